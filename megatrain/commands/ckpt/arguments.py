"""Arguments that several verbs of `megatrain ckpt` take."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from megatrain.commands.argument_types import utf8_text

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", dest="is_json", help="print one JSON object")


def add_run(parser: argparse.ArgumentParser, *, may_be_branch: bool = True) -> None:
    """Declare DIR: a run, or a part of it."""
    parts = ", its checkpoints directory, or one branch of them" if may_be_branch else " or its checkpoints directory"
    parser.add_argument(
        "location",
        type=utf8_text,
        metavar="DIR",
        help=f"a run directory{parts}: a path or a URL",
    )
