"""`megatrain ckpt verify`: read all files of checkpoints, and name each file that differs from what was written."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megatrain.checkpoint.find import ResolvedLocation, find_checkpoint, no_checkpoint, resolve_location
from megatrain.checkpoint.verification import verify_checkpoint
from megatrain.checkpoint_format.branches import list_branches
from megatrain.checkpoint_format.checkpoint_files import is_unfinished, read_manifest
from megatrain.checkpoint_format.checkpoint_names import step_directory_name, step_of
from megatrain.checkpoint_format.commit import committed_steps
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.resume_point import resume_point
from megatrain.checkpoint_format.verifications import Verification, record_verifications
from megatrain.commands.argument_types import Verbs, add_json, utf8_text
from megatrain.commands.checkpoint_choice import add_checkpoint
from megatrain.commands.printing import print_json, print_lines, print_note
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.exit_codes import ExitCode


@dataclass(frozen=True, slots=True)
class _Target:
    """A checkpoint to verify, and the branch to which it must belong; None: any."""

    location: Location
    branch: str | None


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "verify", help="read all of a checkpoint and compare it with the digests", allow_abbrev=False
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--all", action="store_true", dest="is_all", help="verify every checkpoint that was ever complete"
    )
    parser.add_argument("--job", type=utf8_text, metavar="NAME",
                        help="job of the checkpoint (default: that of most checkpoints of the run)")  # fmt: skip
    add_json(parser)
    parser.set_defaults(run_verb=run, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Verify. Return ExitCode.CHECKPOINT if a checkpoint is damaged, else OK.

    Raises: CheckpointError when there is nothing to verify.
    """
    if args.is_all and (args.step is not None or args.branch is not None):
        args.usage_error("--all takes neither --step nor --branch; to verify all of a branch, name its directory")
    resolved = resolve_location(args.location)
    targets = list(_all_of(resolved)) if args.is_all else [_one_of(resolved, args)]
    if not targets:
        raise no_checkpoint(args.location)
    job = args.job or (_usual_job(resolved.checkpoints) if resolved.checkpoints is not None else None)
    results = []
    verified: list[Verification] = []
    for target in targets:
        problems = verify_checkpoint(target.location, job=job, branch=target.branch)
        if problems and args.is_all and not target.location.exists():
            continue  # a running job removed it meanwhile
        results.append({"place": str(target.location), "problems": problems})
        if target.branch is not None and (step := step_of(target.location.name)) is not None:
            verified.append(Verification.of(target.branch, step, time.time(), problems))
        if not args.is_json:
            print_lines(
                [f"{target.location}: {'DAMAGED' if problems else 'OK'}", *(f"  {problem}" for problem in problems)]
            )
    _store_results(resolved.checkpoints, verified)
    num_damaged = sum(bool(result["problems"]) for result in results)
    if args.is_json:
        print_json({"num_damaged": num_damaged, "checkpoints": results})
    return int(ExitCode.CHECKPOINT if num_damaged else ExitCode.OK)


def _store_results(checkpoints: Location | None, verified: list[Verification]) -> None:
    """Store the results beside the checkpoints, for other commands to show; print a note if that fails."""
    if checkpoints is None or not verified:
        return
    try:
        record_verifications(checkpoints, verified)
    except CheckpointError as error:
        print_note(f"note: the result was not stored: {error}")


def _one_of(resolved: ResolvedLocation, args: argparse.Namespace) -> _Target:
    if resolved.checkpoint is not None and args.step is None and args.branch is None:
        # an uncommitted checkpoint is verified too: its problems are the result
        return _Target(resolved.checkpoint, resolved.branch)
    if resolved.checkpoints is not None and (args.step, args.branch, resolved.branch) == (None, None, None):
        for note in resume_point(resolved.checkpoints).skipped:
            print_note(f"note: {note}")
    found = find_checkpoint(args.location, args.step, args.branch)
    return _Target(found, read_manifest(found).branch)


def _all_of(resolved: ResolvedLocation) -> Iterator[_Target]:
    if resolved.checkpoints is None:
        raise CheckpointError(f"{resolved.checkpoint} is one checkpoint outside of a run; verify it without --all")
    for branch in list_branches(resolved.checkpoints):
        if resolved.branch in (None, branch.name):
            directory = resolved.checkpoints / branch.name
            # a checkpoint that has lost its COMMIT or manifest is damaged too, and no other command reports that
            steps = sorted((step, entry) for entry in directory.entries() if (step := step_of(entry.name)) is not None)
            yield from (_Target(entry, branch.name) for _, entry in steps if not is_unfinished(entry))


def _usual_job(checkpoints: Location) -> str | None:
    """Return the job of most checkpoints. Only the job identifies a checkpoint that was copied from another run."""
    jobs: Counter[str] = Counter()
    for branch in list_branches(checkpoints):
        directory = checkpoints / branch.name
        for step in committed_steps(directory):
            try:
                jobs[read_manifest(directory / step_directory_name(step)).job] += 1
            except CheckpointError:
                continue  # verification reports it
    return jobs.most_common(1)[0][0] if jobs else None
