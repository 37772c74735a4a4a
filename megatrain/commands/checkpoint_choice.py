"""How a command line names a checkpoint: a place, and the options that choose one of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.checkpoint.find import find_checkpoint, name_place
from megatrain.commands.argument_types import utf8_text, whole_number
from megatrain.contracts.checkpoint_files import COMMIT_NAME
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.lineage import candidates
from megatrain.contracts.location import Location
from megatrain.contracts.printable import printable
from megatrain.contracts.resume_point import with_problems


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Declare CHECKPOINT and the options that choose one of a run."""
    parser.add_argument(
        "place",
        type=utf8_text,
        metavar="CHECKPOINT",
        help="a checkpoint; or a run, its checkpoints directory or a branch: then the one that it would go on from; "
        "a path or a URL",
    )
    parser.add_argument("--step", type=whole_number(0), metavar="N", help="of a run or branch: the one of step N")
    parser.add_argument("--branch", type=utf8_text, metavar="NAME", help="of a run: of this branch")


def chosen_checkpoint(args: argparse.Namespace) -> Location:
    """Return the committed checkpoint that the arguments of `add_checkpoint` mean.

    Of a run or branch it is, as for a job, the newest that is not known to be damaged; what is passed over is noted.
    Raises: CheckpointError.
    """
    named = name_place(args.place)
    if named.checkpoints is not None and named.checkpoint is None and args.step is None:
        passed_over: list[str] = []
        found = candidates(named.checkpoints, args.branch or named.branch)
        for one, problem in with_problems(named.checkpoints, found):
            if problem is None:
                for note in passed_over:
                    print(f"megatrain: note: {printable(note)}", file=sys.stderr)
                return one.location
            passed_over.append(f"{one.branch}/{one.location.name} is damaged and was skipped: {problem}")
    return find_checkpoint(args.place, args.step, args.branch)


@contextmanager
def reading(checkpoint: Location) -> Iterator[None]:
    """Tell in an error of the block that a job, or somebody, has removed the checkpoint that is read in it.

    Raises: CheckpointError.
    """
    try:
        yield
    except MissingFileError as error:
        if (checkpoint / COMMIT_NAME).exists():
            raise
        raise CheckpointError(
            f"{checkpoint} was removed while it was read ({error}); pin what a job's retention may remove meanwhile"
        ) from error
