"""`megatrain ckpt restore DIR --step N`: have the run go on from an older step, on a new branch.

Nothing is removed or changed: what came after that step stays where it is, and is abandoned. A job that is running does
not notice, and goes on to write what will be abandoned: so it has to be stopped first, unless --force is given.
"""

from __future__ import annotations

import argparse
import shlex

from megatrain.checkpoint.activity import Activity, look_for_job
from megatrain.checkpoint.data_file import verify_checkpoint
from megatrain.checkpoint.find import find_step, name_place
from megatrain.commands.argument_types import utf8_text, whole_number
from megatrain.commands.ckpt.arguments import Verbs, add_json, add_run
from megatrain.commands.printing import print_json, print_lines, print_note
from megatrain.contracts.checkpoint_files import step_of
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.lineage import Candidate, candidates, open_branch
from megatrain.contracts.location import Location


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser("restore", help="go on from an older step, on a new branch", allow_abbrev=False)
    add_run(parser)
    parser.add_argument("--step", type=whole_number(0), metavar="N", help="the committed step (default: DIR's, if it "
                        "is one checkpoint)")  # fmt: skip
    parser.add_argument("--branch", type=utf8_text, metavar="NAME", help="of this branch and those that it began from "
                        "(default: the current one)")  # fmt: skip
    parser.add_argument("--reason", type=utf8_text, default="", metavar="TEXT", help="why, for who reads `ls`")
    parser.add_argument("--no-verify", action="store_false", dest="is_verified", help="do not read all of it first")
    parser.add_argument(
        "--force", action="store_true", help="also while a job is running there, which goes on as it is"
    )
    add_json(parser)
    parser.set_defaults(run_verb=run, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Open the branch.

    Raises: CheckpointError when a job is running, the step is not committed, damaged, or nothing can be written.
    """
    named = name_place(args.place)
    if named.checkpoints is None:
        raise CheckpointError(f"{args.place} is one checkpoint outside of a run; checkpoint.load starts a run from it")
    step = args.step
    if step is None and named.checkpoint is not None:
        step = step_of(named.checkpoint.name)
    if step is None:
        args.usage_error(f"--step is needed: {args.place} is not one checkpoint of a run")
    chosen = find_step(named, args.place, step, args.branch)
    _look_for_job(named.checkpoints, is_forced=args.force)
    problems = verify_checkpoint(chosen.location, branch=chosen.branch) if args.is_verified else []
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"nothing was changed, because {chosen.location} is damaged: {'; '.join(problems[:3])}{more}"
        )
    activity = _look_for_job(named.checkpoints, is_forced=args.force)  # again: reading all of it takes a while
    before = _line(named.checkpoints)
    branch = open_branch(named.checkpoints, chosen.branch, chosen.step, args.reason or f"restored to step {step}")
    abandoned = sorted(before - _line(named.checkpoints))
    if args.is_json:
        print_json({
            "place": str(named.checkpoints), "branch": branch.name, "parent": branch.parent, "step": chosen.step,
            "checkpoint": str(chosen.location), "is_verified": args.is_verified, "abandoned": abandoned,
            "running": list(activity.running), "traces": list(activity.traces),
        })  # fmt: skip
    else:
        print_lines(_lines(branch.name, chosen, abandoned, args.place))
    for note in _notes(activity):
        print_note(note)
    return int(ExitCode.OK)


def _look_for_job(checkpoints: Location, *, is_forced: bool) -> Activity:
    activity = look_for_job(checkpoints)
    if activity.running and not is_forced:
        raise CheckpointError(
            f"{checkpoints}: {'; '.join(activity.running)}. Nothing was changed: the job would not notice, and when it "
            "is started again, all that it has saved since would be abandoned. Stop it first, or say --force"
        )
    return activity


def _notes(activity: Activity) -> list[str]:
    """Return what to look out for, because the job may be running."""
    if activity.running:
        signs = "; ".join(activity.running)
        return [
            f"WARNING: {signs}; that job goes on as it is until it is started again, and what it saves is abandoned"
        ]
    return [
        f"note: {trace}; if a job is still running on another host, it goes on as it is until it is started again"
        for trace in activity.traces[:1]
    ]


def _line(checkpoints: Location) -> set[str]:
    """Return the checkpoints that the run could go on from."""
    try:
        return {f"{one.branch}/{one.location.name}" for one in candidates(checkpoints)}
    except CheckpointError:
        return set()  # all of its line is gone: that may be why another branch is asked for


def _lines(branch: str, chosen: Candidate, abandoned: list[str], place: str) -> list[str]:
    lines = [f"when it starts again, the run goes on from {chosen.location}, on the new branch {branch}"]
    if abandoned:
        some = ", ".join(abandoned) if len(abandoned) <= 5 else f"{len(abandoned):,} checkpoints up to {abandoned[-1]}"
        lines.append(f"abandoned, and still there: {some}")
        lines.append(f"(`megatrain ckpt prune {shlex.quote(place)} --abandoned` would remove them)")
    return lines
