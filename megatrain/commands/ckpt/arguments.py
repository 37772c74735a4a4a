"""Arguments that several verbs of `megatrain ckpt` take."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from megatrain.checkpoint.find import find_checkpoint
from megatrain.commands.argument_types import utf8_text, whole_number
from megatrain.contracts.location import Location

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


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Declare CHECKPOINT and the options that choose one of a run."""
    parser.add_argument(
        "place",
        type=utf8_text,
        metavar="CHECKPOINT",
        help="a checkpoint; or a run, its checkpoints directory or a branch: then the one that it would go on from",
    )
    parser.add_argument("--step", type=whole_number(0), metavar="N", help="of a run or branch: the one of step N")
    parser.add_argument("--branch", type=utf8_text, metavar="NAME", help="of a run: of this branch")


def chosen_checkpoint(args: argparse.Namespace) -> Location:
    """Return the committed checkpoint that the arguments of `add_checkpoint` mean.

    Raises: CheckpointError.
    """
    return find_checkpoint(args.place, args.step, args.branch)
