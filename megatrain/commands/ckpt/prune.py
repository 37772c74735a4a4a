"""`megatrain ckpt prune DIR`: remove the checkpoints that retention does not keep; without --yes, only list them.

In the ancestry of the current branch retention keeps the newest K checkpoints, steps that are multiples of N, pinned
checkpoints, and those at which a branch of the ancestry begins. Damaged checkpoints do not count among the newest K.
Retention treats a checkpoint of the current branch that lacks only its COMMIT like a complete one. A checkpoint that a
job may be writing is not removed, even on a branch that was abandoned while the job was running.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.checkpoint.activity import find_job
from megatrain.checkpoint.find import no_checkpoint, resolve_location
from megatrain.checkpoint.survey import CheckpointState, FoundCheckpoint, survey
from megatrain.checkpoint_format.branches import ancestry
from megatrain.checkpoint_format.checkpoint_files import is_pinned, lacks_only_commit, read_manifest
from megatrain.checkpoint_format.claims import Claims
from megatrain.checkpoint_format.lineage import Candidate, candidates, current_branch, origins
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.removals import Remover
from megatrain.checkpoint_format.resume_point import with_problems
from megatrain.checkpoint_format.retention import resolved_keep_last, to_remove
from megatrain.commands.argument_types import Verbs, add_json, whole_number
from megatrain.commands.checkpoint_choice import add_run
from megatrain.commands.printing import print_json, print_lines
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.formatting import bytes_text, count_text

_NUM_SHOWN = 20


@dataclass(frozen=True, slots=True)
class _Removal:
    """A checkpoint to remove, and the reason."""

    found: FoundCheckpoint
    reason: str


@dataclass(frozen=True, slots=True)
class _Plan:
    """The checkpoints to remove. left_alone: a sentence for each damaged, abandoned or incomplete one that is kept."""

    keep_last: int
    keep_every: int
    removals: tuple[_Removal, ...]
    left_alone: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(removal.found.num_bytes for removal in self.removals)


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser("prune", help="remove old checkpoints; a dry run without --yes", allow_abbrev=False)
    add_run(parser, may_be_branch=False)
    parser.add_argument("--keep-last", type=whole_number(0), metavar="K",
                        help="keep the newest K, 0: all (default: checkpoint.keep_last of the job)")  # fmt: skip
    parser.add_argument("--keep-every", type=whole_number(0), metavar="N",
                        help="keep multiples of N, 0: none (default: checkpoint.keep_every of the job)")  # fmt: skip
    parser.add_argument(
        "--abandoned", action="store_true", help="also remove checkpoints outside the history of the current branch"
    )
    parser.add_argument("--yes", action="store_true", help="remove the checkpoints")
    add_json(parser)
    parser.set_defaults(run_verb=run, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Remove checkpoints, or list what would be removed. Raises: CheckpointError when the lineage is damaged, or
    removing fails.
    """
    resolved = resolve_location(args.location)
    if resolved.checkpoints is None or resolved.checkpoint is not None:
        raise CheckpointError(f"{args.location} is one checkpoint; name the run or its checkpoints directory")
    if resolved.branch is not None:
        # a branch must keep the checkpoint at which another branch begins, so all branches are examined together
        raise CheckpointError(
            f"{args.location} is one branch; prune works on all of a run: name {resolved.checkpoints}"
        )
    newest_claim = Claims(resolved.checkpoints).newest_number()
    plan = _make_plan(resolved.checkpoints, args)
    if args.yes:
        chosen = [(removal.found.branch, removal.found.step) for removal in plan.removals]
        for _ in Remover().remove(resolved.checkpoints, chosen, newest_claim):
            pass
    if args.is_json:
        print_json({
            "place": str(resolved.checkpoints), "is_dry_run": not args.yes, "keep_last": plan.keep_last,
            "keep_every": plan.keep_every, "num_bytes": plan.num_bytes, "left_alone": list(plan.left_alone),
            "removed": [
                {"branch": removal.found.branch, "step": removal.found.step, "place": str(removal.found.location),
                 "num_bytes": removal.found.num_bytes, "reason": removal.reason}
                for removal in plan.removals
            ],
        })  # fmt: skip
    else:
        print_lines(_lines(plan, is_dry_run=not args.yes))
    return int(ExitCode.OK)


def _make_plan(checkpoints: Location, args: argparse.Namespace) -> _Plan:
    resumable = candidates(checkpoints)
    if not resumable:
        raise no_checkpoint(args.location)
    whole = [candidate for candidate, problem in with_problems(checkpoints, resumable) if problem is None]
    keep_last, keep_every = _retention(args, whole)
    if args.keep_every and not keep_last:
        args.usage_error("--keep-every has no effect when all are kept; give --keep-last as well")
    outdated = _outdated(checkpoints, whole, keep_last, keep_every)
    in_ancestry = {(candidate.branch, candidate.step) for candidate in resumable}
    is_whole = {(candidate.branch, candidate.step) for candidate in whole}
    found, activity = survey(checkpoints), find_job(checkpoints)
    lacking = [
        Candidate(checkpoint.branch, checkpoint.step, checkpoint.location)
        for checkpoint in found.checkpoints
        if checkpoint.branch == found.current and lacks_only_commit(checkpoint.location, checkpoint.branch)
    ]
    # retention applies to these as to complete ones: an interrupted removal leaves the same files
    cut_short = _outdated(checkpoints, [*whole, *lacking], keep_last, keep_every)
    newest = _newest_whole(found.checkpoints, in_ancestry - is_whole)
    removals: list[_Removal] = []
    left_alone: list[str] = []
    for checkpoint in found.checkpoints:
        at = (checkpoint.branch, checkpoint.step)
        if at in outdated:
            removals.append(_Removal(checkpoint, "older than what retention keeps"))
        elif at in in_ancestry:
            left_alone += (
                [] if at in is_whole else [f"{checkpoint.name}: damaged; `megatrain ckpt verify` shows the damage"]
            )
        elif is_pinned(checkpoint.location):
            continue
        elif checkpoint.state is CheckpointState.BEING_REMOVED:
            removals.append(_Removal(checkpoint, "its removal had begun"))
        elif checkpoint.branch != found.current and activity.may_write_to(checkpoint.branch):
            left_alone.append(f"{checkpoint.name}: a job may be writing to {checkpoint.branch}")
        elif checkpoint.state in (CheckpointState.COMMITTED, CheckpointState.DAMAGED):
            if args.abandoned:
                removals.append(_Removal(checkpoint, "abandoned: not in the history of the current branch"))
            else:
                left_alone.append(f"{checkpoint.name}: abandoned; --abandoned removes it")
        elif not args.abandoned and lacks_only_commit(checkpoint.location, checkpoint.branch):
            if at in cut_short:
                removals.append(_Removal(checkpoint, "older than what retention keeps"))
            else:
                why = "complete except for a valid COMMIT; --abandoned removes it"
                left_alone.append(f"{checkpoint.name}: {why}")
        elif checkpoint.step < newest.get(checkpoint.branch, -1) or (
            args.abandoned and checkpoint.branch != found.current
        ):
            removals.append(_Removal(checkpoint, f"{checkpoint.state}: no process will finish it"))
        else:
            left_alone.append(f"{checkpoint.name}: {checkpoint.state}; a job may still be writing it")
    return _Plan(keep_last, keep_every, tuple(removals), tuple(left_alone))


def _retention(args: argparse.Namespace, whole: Sequence[Candidate]) -> tuple[int, int]:
    """Return keep_last and keep_every: from the options, else from the job's configuration."""
    config = read_manifest(whole[0].location).config.get("checkpoint", {}) if whole else {}
    configured, interval, keep_every = (config.get(name, 0) for name in ("keep_last", "interval", "keep_every"))
    return (
        resolved_keep_last(configured, interval) if args.keep_last is None else args.keep_last,
        keep_every if args.keep_every is None else args.keep_every,
    )


def _outdated(
    checkpoints: Location, whole: Sequence[Candidate], keep_last: int, keep_every: int
) -> set[tuple[str, int]]:
    """Return branch and step of each checkpoint that retention does not keep. An ancestry has each step once."""
    branch_of = {checkpoint.step: checkpoint.branch for checkpoint in whole}
    branches = ancestry(checkpoints, current_branch(checkpoints))
    kept = {checkpoint.step for checkpoint in whole if is_pinned(checkpoint.location)}
    for branch in set(branch_of.values()):
        kept |= origins(branches, branch, [step for step, name in branch_of.items() if name == branch])
    gone = to_remove(list(branch_of), kept, keep_last, keep_every)
    return {(branch_of[step], step) for step in gone}


def _newest_whole(found: Sequence[FoundCheckpoint], damaged: set[tuple[str, int]]) -> dict[str, int]:
    """Return the newest intact step of each branch. Steps are saved in order, so no older one will be completed."""
    newest: dict[str, int] = {}
    for checkpoint in found:
        if (
            checkpoint.state in (CheckpointState.COMMITTED, CheckpointState.PINNED)
            and (checkpoint.branch, checkpoint.step) not in damaged
        ):
            newest[checkpoint.branch] = max(checkpoint.step, newest.get(checkpoint.branch, -1))
    return newest


def _lines(plan: _Plan, *, is_dry_run: bool) -> list[str]:
    if plan.keep_last:
        every = f" and every {plan.keep_every} steps" if plan.keep_every else ""
        kept = f"the newest {plan.keep_last}{every}, pinned ones, and those at which a branch begins"
    else:
        kept = "all in the history of the current branch (--keep-last K keeps only the newest K)"
    lines = [f"retention keeps {kept}"]
    verb = "would remove" if is_dry_run else "removed"
    lines += [
        f"{verb} {removal.found.name} ({bytes_text(removal.found.num_bytes)}): {removal.reason}"
        for removal in plan.removals
    ] or ["nothing to remove"]
    lines += [f"left alone {problem}" for problem in plan.left_alone[:_NUM_SHOWN]]
    if len(plan.left_alone) > _NUM_SHOWN:
        lines.append(f"left alone {len(plan.left_alone) - _NUM_SHOWN:,} more; --json lists all")
    if plan.removals:
        lines.append(f"{verb} {count_text(len(plan.removals), 'checkpoint')}, {bytes_text(plan.num_bytes)}")
        lines += ["this was a dry run; --yes removes them"] if is_dry_run else []
    return lines
