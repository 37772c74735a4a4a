"""`megatrain ckpt restore DIR --step N`: make a run resume from an older step, on a new branch.

No checkpoint is removed or changed: later checkpoints stay on disk as abandoned. A restore does not affect a running
job, and the checkpoints that the job still saves are abandoned at its next start. So the job must be stopped first,
unless --force is given.
"""

from __future__ import annotations

import argparse
import shlex

from megatrain.checkpoint.activity import Activity, find_job
from megatrain.checkpoint.find import find_step, resolve_location
from megatrain.checkpoint.verification import verify_checkpoint
from megatrain.checkpoint_format.checkpoint_names import step_of
from megatrain.checkpoint_format.lineage import Candidate, candidates, claim_next_round, open_branch
from megatrain.checkpoint_format.location import Location
from megatrain.commands.argument_types import Verbs, add_json, utf8_text, whole_number
from megatrain.commands.checkpoint_choice import add_run
from megatrain.commands.printing import print_json, print_lines, print_note
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.formatting import problems_text


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "restore", help="open a new branch at an older step; the next launch resumes there", allow_abbrev=False
    )
    add_run(parser)
    parser.add_argument("--step", type=whole_number(0), metavar="N", help="the committed step (default: that of "
                        "DIR, if DIR is one checkpoint)")  # fmt: skip
    parser.add_argument("--branch", type=utf8_text, metavar="NAME", help="search this branch and its ancestors "
                        "(default: the current one)")  # fmt: skip
    parser.add_argument("--reason", type=utf8_text, default="", metavar="TEXT", help="why, shown by `ckpt ls`")
    parser.add_argument(
        "--no-verify", action="store_false", dest="is_verified", help="do not verify the checkpoint first"
    )
    parser.add_argument(
        "--force", action="store_true", help="restore even while a job is running there; that job is not affected"
    )
    add_json(parser)
    parser.set_defaults(run_verb=run, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Open the branch.

    Raises: CheckpointError when a job is running, the step is not committed or is damaged, or writing fails.
    """
    resolved = resolve_location(args.location)
    if resolved.checkpoints is None:
        raise CheckpointError(
            f"{args.location} is one checkpoint outside of a run; checkpoint.load starts a run from it"
        )
    step = args.step
    if step is None and resolved.checkpoint is not None:
        step = step_of(resolved.checkpoint.name)
    if step is None:
        args.usage_error(f"--step is needed: {args.location} is not one checkpoint of a run")
    chosen = find_step(resolved, args.location, step, args.branch)
    _checked_activity(resolved.checkpoints, is_forced=args.force)
    problems = verify_checkpoint(chosen.location, branch=chosen.branch) if args.is_verified else []
    if problems:
        raise CheckpointError(
            f"nothing was changed, because {chosen.location} is damaged: {problems_text(problems, 3)}"
        )
    activity = _checked_activity(resolved.checkpoints, is_forced=args.force)  # check again: verification takes a while
    before = _resumable(resolved.checkpoints)
    number = claim_next_round(resolved.checkpoints)
    # find it again: before the claim, a job may have removed it
    chosen = find_step(resolved, args.location, step, args.branch)
    reason = args.reason or f"restored to step {step}"
    branch = open_branch(resolved.checkpoints, chosen.branch, chosen.step, reason, round_number=number)
    abandoned = sorted(before - _resumable(resolved.checkpoints))
    if args.is_json:
        print_json({
            "place": str(resolved.checkpoints), "branch": branch.name, "parent": branch.parent, "step": chosen.step,
            "checkpoint": str(chosen.location), "is_verified": args.is_verified, "abandoned": abandoned,
            "running": list(activity.running), "traces": list(activity.traces),
        })  # fmt: skip
    else:
        print_lines(_lines(branch.name, chosen, abandoned, args.location))
    for note in _notes(activity):
        print_note(note)
    return int(ExitCode.OK)


def _checked_activity(checkpoints: Location, *, is_forced: bool) -> Activity:
    activity = find_job(checkpoints)
    if activity.running and not is_forced:
        raise CheckpointError(
            f"{checkpoints}: {'; '.join(activity.running)}. Nothing was changed: the restore would not affect the "
            "running job, and at its next start all checkpoints that it had saved since would be abandoned. Stop it "
            "first, or give --force"
        )
    return activity


def _notes(activity: Activity) -> list[str]:
    """Return a note if a job is running, or if there are signs that it may be."""
    if activity.running:
        signs = "; ".join(activity.running)
        effect = "that job continues unchanged until it is started again, and what it saves until then is abandoned"
        return [f"WARNING: {signs}; {effect}"]
    return [
        f"note: {trace}; if a job is still running on another host, it continues unchanged until it is started again"
        for trace in activity.traces[:1]
    ]


def _resumable(checkpoints: Location) -> set[str]:
    """Return the checkpoints from which the run can resume."""
    try:
        return {f"{candidate.branch}/{candidate.location.name}" for candidate in candidates(checkpoints)}
    except CheckpointError:
        return set()  # its checkpoints are gone, perhaps the reason for the restore


def _lines(branch: str, chosen: Candidate, abandoned: list[str], location: str) -> list[str]:
    lines = [f"at its next start, the run resumes from {chosen.location}, on the new branch {branch}"]
    if abandoned:
        some = ", ".join(abandoned) if len(abandoned) <= 5 else f"{len(abandoned):,} checkpoints up to {abandoned[-1]}"
        lines.append(f"abandoned, but not removed: {some}")
        lines.append(f"(`megatrain ckpt prune {shlex.quote(location)} --abandoned` removes them)")
    return lines
