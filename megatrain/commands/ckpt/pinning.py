"""`megatrain ckpt pin` and `unpin`: protect a checkpoint from removal, or allow its removal again."""

from __future__ import annotations

import argparse

from megatrain.checkpoint.activity import find_job
from megatrain.checkpoint.find import resolve_location
from megatrain.checkpoint_format.checkpoint_files import is_pinned, pin, read_manifest, unpin
from megatrain.checkpoint_format.checkpoint_names import step_of
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.removals import check_not_being_removed
from megatrain.checkpoint_format.retention import resolved_keep_last
from megatrain.commands.argument_types import Verbs, add_json, utf8_text
from megatrain.commands.checkpoint_choice import add_checkpoint, chosen_checkpoint
from megatrain.commands.printing import print_json, print_lines, print_note
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.exit_codes import ExitCode


def add_verb(verbs: Verbs) -> None:
    pin_parser = verbs.add_parser("pin", help="protect a checkpoint from removal", allow_abbrev=False)
    add_checkpoint(pin_parser)
    pin_parser.add_argument("--reason", type=utf8_text, default="", metavar="TEXT", help="why, shown by `ckpt ls`")
    add_json(pin_parser)
    pin_parser.set_defaults(run_verb=run_pin)
    unpin_parser = verbs.add_parser("unpin", help="allow the removal of a pinned checkpoint again", allow_abbrev=False)
    add_checkpoint(unpin_parser)
    add_json(unpin_parser)
    unpin_parser.set_defaults(run_verb=run_unpin)


def run_pin(args: argparse.Namespace) -> int:
    """Pin the checkpoint. Raises: CheckpointError when it is not committed or cannot be written."""
    checkpoint = chosen_checkpoint(args)
    pin(checkpoint, args.reason)
    resolved = resolve_location(str(checkpoint))
    step = step_of(checkpoint.name)
    if resolved.checkpoints is not None and resolved.branch is not None and step is not None:
        # a removal that began before PINNED was written ignores the pin
        check_not_being_removed(resolved.checkpoints, resolved.branch, step)
    if args.is_json:
        print_json({"place": str(checkpoint), "is_pinned": True, "reason": args.reason})
    else:
        print_lines([f"{checkpoint} is pinned"])
    return int(ExitCode.OK)


def run_unpin(args: argparse.Namespace) -> int:
    """Unpin the checkpoint. Does nothing for one that is not pinned. Raises: CheckpointError."""
    checkpoint = chosen_checkpoint(args)
    was_pinned = is_pinned(checkpoint)
    unpin(checkpoint)
    if args.is_json:
        print_json({"place": str(checkpoint), "is_pinned": False, "was_pinned": was_pinned})
    else:
        print_lines([f"{checkpoint} is no longer pinned" if was_pinned else f"{checkpoint} was not pinned"])
    for note in _notes(args.location, checkpoint) if was_pinned else ():
        print_note(note)
    return int(ExitCode.OK)


def _notes(text: str, checkpoint: Location) -> list[str]:
    """Return a note if a running job may remove the unpinned checkpoint."""
    try:
        configured = read_manifest(checkpoint).config.get("checkpoint", {})
        keep_last = resolved_keep_last(configured.get("keep_last", 0), configured.get("interval", 0))
        checkpoints = resolve_location(text).checkpoints
        activity = find_job(checkpoints) if keep_last and checkpoints is not None else None
    except CheckpointError:
        return []  # the checkpoint is unpinned, even if other files there are damaged
    if activity is None or not (activity.running or activity.traces):
        return []
    sign = "; ".join(activity.running or activity.traces[:1])
    return [f"note: {sign}; with checkpoint.keep_last={keep_last} that job may remove it after its next checkpoint"]
