"""Arguments that several verbs of `megatrain ckpt` take."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from megatrain.commands.argument_types import utf8_text

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", dest="is_json", help="print one JSON object")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Declare DIR: a run, or a part of it."""
    parser.add_argument(
        "place",
        type=utf8_text,
        metavar="DIR",
        help="a run directory, its checkpoints directory, or one branch of them: a path or a URL",
    )
