"""Arguments that name a run or a checkpoint: a path or URL, and options that choose one checkpoint of a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.checkpoint.find import choose_checkpoint
from megatrain.checkpoint_format.checkpoint_names import COMMIT_NAME
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.stored_tensors import EMA, MASTER
from megatrain.commands.argument_types import utf8_text, whole_number
from megatrain.commands.printing import print_note
from megatrain.contracts.errors import CheckpointError, MissingFileError


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Declare CHECKPOINT and the options that choose one checkpoint of a run."""
    parser.add_argument(
        "location",
        type=utf8_text,
        metavar="CHECKPOINT",
        help="path or URL of a checkpoint; or of a run, its checkpoints directory or a branch: then the checkpoint "
        "from which a job would resume",
    )
    parser.add_argument("--step", type=whole_number(0), metavar="N", help="the checkpoint of step N of a run or branch")
    parser.add_argument("--branch", type=utf8_text, metavar="NAME", help="a checkpoint of this branch of a run")


def add_ema(parser: argparse.ArgumentParser) -> None:
    """Declare --ema. It sets `kind`, the kind of stored tensors that are read as weights."""
    parser.add_argument(
        "--ema",
        action="store_const",
        dest="kind",
        const=EMA,
        default=MASTER,
        help="take the moving average of the weights (optimizer.ema_decay)",
    )


def chosen_checkpoint(args: argparse.Namespace) -> Location:
    """Return the committed checkpoint that the arguments of `add_checkpoint` choose.

    For a run or branch it is the newest without known damage, as when a job resumes. A note names each skipped one.
    Raises: CheckpointError.
    """
    checkpoint, notes = choose_checkpoint(args.location, args.step, args.branch)
    for note in notes:
        print_note(f"note: {note}")
    return checkpoint


@contextmanager
def reading(checkpoint: Location) -> Iterator[None]:
    """Report a missing file in the block as a removed checkpoint, if COMMIT is missing too.

    Raises: CheckpointError.
    """
    try:
        yield
    except MissingFileError as error:
        if (checkpoint / COMMIT_NAME).exists():
            raise
        raise CheckpointError(
            f"{checkpoint} was removed while it was read ({error}); `megatrain ckpt pin` protects a checkpoint "
            "from a job's retention"
        ) from error


def add_run(parser: argparse.ArgumentParser, *, may_be_branch: bool = True) -> None:
    """Declare DIR: a run, or a part of it."""
    parts = ", its checkpoints directory, or one branch of them" if may_be_branch else " or its checkpoints directory"
    parser.add_argument(
        "location",
        type=utf8_text,
        metavar="DIR",
        help=f"a run directory{parts}: a path or a URL",
    )
