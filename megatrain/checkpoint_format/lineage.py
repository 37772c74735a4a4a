"""Branches of a run's checkpoints, and the point where the run resumes.

    claims/00000012         round 12 has claimed the right to write here: claims.py
    claims/00000012.resume  where round 12 resumed: branch and step; the newest one names the run's current branch
    main/BRANCH             the origin of a branch: its parent and the parent's step
    main/step-...           its checkpoints

A round's number is the number of its claim. A checkpoint of an older round is superseded, and does not count, if a
newer round has resumed from an earlier step: the checkpoint was committed after the newer round had started. Going back
to an older step never removes anything. It opens another branch, which begins at that step of its parent. Steps of the
parent after that step are abandoned and never "newest" again. BRANCH is written first and the resume record last, each
atomically, so a crash in between leaves the run's state unchanged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatrain.checkpoint_format.branches import (
    BRANCH_NAME,
    MAIN_BRANCH,
    Branch,
    ancestry,
    branch_names,
    is_branch_name,
    next_branch_name,
    read_branch,
    write_branch,
)
from megatrain.checkpoint_format.checkpoint_files import is_unfinished
from megatrain.checkpoint_format.checkpoint_names import step_directory_name, step_of
from megatrain.checkpoint_format.claims import CLAIMS_NAME, Claims
from megatrain.checkpoint_format.commit import committed_rounds, is_committed
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.removals import being_removed, removal_text
from megatrain.checkpoint_format.round_starts import (
    RoundStart,
    begin_round,
    is_superseded,
    newest_start,
    round_starts,
    start_location,
    started_rounds,
)
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.checkpoint_format.verifications import VERIFIED_NAME
from megatrain.contracts.errors import CheckpointError
from megatrain.formatting import names_text

LOCK_NAME = "LOCK"
"""The lock file in a checkpoint.directory. The run that saves there holds the lock."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A committed checkpoint that a run may resume from."""

    branch: str
    step: int
    location: Location


def current_branch(checkpoints: Location) -> str:
    """Return the run's current branch: the newest round's. Without a resume record, the only branch, or "main".

    Raises: CheckpointError when the record that names it is damaged, names a missing branch, or is missing although
    there are several branches.
    """
    start = newest_start(checkpoints)
    names = branch_names(checkpoints)
    if start is not None:
        if start.branch not in names:
            raise CheckpointError(
                f"{start_location(checkpoints, start.round)}: branch={start.branch!r}, but"
                f" {checkpoints / start.branch / BRANCH_NAME} is missing; name another branch there, or restore it"
            )
        return start.branch
    if len(names) > 1:
        record = start_location(checkpoints, max(1, Claims(checkpoints).newest_number()))
        raise CheckpointError(
            f'{record} is missing; it must name the branch to continue, as {{"schema_version": 1, "branch": "main",'
            f' "step": null}} (there are: {", ".join(names)})'
        )
    return names[0] if names else MAIN_BRANCH


def candidates(checkpoints: Location, branch: str | None = None) -> list[Candidate]:
    """Return the committed checkpoints that a run may resume from, best first.

    First come the current branch's, newest first, then its parent's up to the step where the branch began, and so on.
    `branch` replaces the current branch. The list is empty only if nothing was ever saved, or if the branch begins at
    step 0 of its parent and nothing was saved on it yet. A checkpoint that was never finished does not count as saved
    (see `unfinished`).
    Raises: CheckpointError when the directory holds something but no committed checkpoint, or the lineage is damaged.
    """
    name = current_branch(checkpoints) if branch is None else branch
    branches = ancestry(checkpoints, name) if branch is not None or name in branch_names(checkpoints) else []
    found = [
        _candidate(checkpoints, name, step)
        for name, limit in _branches_with_limits(branches)
        for step in reversed(steps_that_count(checkpoints, name))
        if step <= limit
    ]
    if not found:
        _check_nothing_was_saved(checkpoints, branches)
    return found


def steps_that_count(checkpoints: Location, branch: str) -> list[int]:
    """Return the steps of a branch's committed checkpoints that are neither superseded nor being removed, ascending.

    Raises: CheckpointError when something cannot be read.
    """
    begun = being_removed(checkpoints)
    rounds = {
        step: number for step, number in committed_rounds(checkpoints / branch).items() if (branch, step) not in begun
    }
    starts = round_starts(checkpoints, branch, min(rounds.values())) if rounds else []
    return [step for step, round_number in sorted(rounds.items()) if not is_superseded(step, round_number, starts)]


def recorded_order(branches: Sequence[Branch]) -> SampleStream | None:
    """Return the sample order that the newest of `branches`, sorted newest first, has recorded; None without one.

    That order also leaves out the samples that older branches leave out.
    """
    return next((member.data for member in branches if member.data is not None), None)


def newer_without_commit(checkpoints: Location, best: Candidate) -> list[Candidate]:
    """Return the checkpoints that would precede `best` if they had not lost COMMIT or the manifest that it names.

    Such a checkpoint was complete once, or a user copied it there. A job that resumes from `best` must report it.
    Raises: CheckpointError when the lineage is damaged or something cannot be read.
    """
    found: list[Candidate] = []
    for name, limit in _branches_with_limits(ancestry(checkpoints, current_branch(checkpoints))):
        is_last = name == best.branch
        steps = sorted(
            (
                step
                for entry in (checkpoints / name).entries()
                if (step := step_of(entry.name)) is not None
                and (best.step if is_last else -1) < step <= limit
                and not is_committed(entry)
                and not is_unfinished(entry)
            ),
            reverse=True,
        )
        found += [_candidate(checkpoints, name, step) for step in steps]
        if is_last:
            break
    return found


def _branches_with_limits(branches: Sequence[Branch]) -> Iterator[tuple[str, float]]:
    """Yield each branch of an ancestry with the largest of its steps that belongs to the ancestry."""
    limit = math.inf
    for member in branches:
        yield member.name, limit
        if member.parent_step is not None:
            # a grandparent's steps count only up to the smallest of the steps at which branches began
            limit = min(limit, member.parent_step)


def _candidate(checkpoints: Location, branch: str, step: int) -> Candidate:
    return Candidate(branch, step, checkpoints / branch / step_directory_name(step))


def unfinished(checkpoints: Location) -> list[Location]:
    """Return the checkpoints of all branches that were begun but never complete: in progress, or abandoned."""
    return [
        location
        for name in branch_names(checkpoints)
        for location in (checkpoints / name).entries()
        if is_unfinished(location) and location.entries()
    ]


def origins(branches: Sequence[Branch], branch: str, steps: Sequence[int]) -> set[int]:
    """Return those of a branch's committed `steps` from which another branch in `branches` begins."""
    starts = [
        [step for step in steps if member.parent_step is not None and step <= member.parent_step]
        for member in branches
        if member.parent == branch
    ]
    return {max(before) for before in starts if before}


def open_branch(
    checkpoints: Location,
    parent: str,
    parent_step: int | None,
    reason: str,
    *,
    rollback: str = "",
    data: SampleStream | None = None,
    round_number: int | None = None,
) -> Branch:
    """Begin a branch at a step of its parent, and make it the run's current branch.

    The first branch of a run, "main", has parent "" and parent_step None. The step need not be committed, because a run
    may resume from memory. `rollback`, `data`: as in Branch. `round_number`: the number that the caller has claimed;
    without it, this function claims one.
    Raises: CheckpointError when the parent does not exist, when `parent` is empty although there is a run, or when a
    write fails.
    """
    names, has_record = branch_names(checkpoints), bool(started_rounds(checkpoints))
    if not parent and (names or has_record):
        listed = ", ".join([CLAIMS_NAME, *names] if has_record else names)
        raise CheckpointError(f"{checkpoints}: holds a run already ({listed}); a new branch of it needs a parent")
    if parent:
        read_branch(checkpoints, parent)
        if round_number is None:
            round_number = claim_next_round(checkpoints)
        if len(names) == 1 and not has_record:
            # one branch needs no resume record, but with two the current branch would be unclear
            begin_round(checkpoints, RoundStart(round_number, names[0], None))
    while True:
        branch = Branch(
            next_branch_name(checkpoints) if parent else MAIN_BRANCH,
            parent,
            parent_step,
            time.time(),
            reason,
            rollback,
            data,
        )
        if write_branch(checkpoints, branch):
            break
    if round_number is not None:
        begin_round(checkpoints, RoundStart(round_number, branch.name, parent_step))
    return branch


def claim_next_round(checkpoints: Location) -> int:
    """Claim a number above those of all rounds that have claimed one or committed a checkpoint, and return it.

    A removal of checkpoints that was chosen before and has not begun is refused from now on. Raises: CheckpointError.
    """
    names = branch_names(checkpoints)
    committed = (number for name in names for number in committed_rounds(checkpoints / name).values())
    return Claims(checkpoints).take(None, 1 + max(committed, default=0)).number


def ensure_branch(checkpoints: Location, reason: str) -> str:
    """Return the run's current branch; open "main" if there is no branch.

    Raises: CheckpointError as `current_branch` and `open_branch` do.
    """
    if not branch_names(checkpoints) and not started_rounds(checkpoints):
        return open_branch(checkpoints, "", None, reason).name
    return current_branch(checkpoints)


def _check_nothing_was_saved(checkpoints: Location, branches: Sequence[Branch]) -> None:
    """Refuse a fresh start when the directory holds remains of a run: that would silently lose the run."""
    names = [branch.name for branch in branches]
    for (name, step), record in being_removed(checkpoints).items():
        if name in names and is_committed(location := checkpoints / name / step_directory_name(step)):
            raise CheckpointError(f"no other checkpoint to resume from is left: {removal_text(location, record)}")
    remains = []
    # a job that went back to before its first step has abandoned all of its other branches
    is_from_scratch = bool(branches) and branches[0].parent_step == 0
    for entry in [checkpoints / branches[0].name] if is_from_scratch else checkpoints.entries():
        if entry.name == CLAIMS_NAME:
            continue
        if step_of(entry.name) is not None or not is_branch_name(entry.name) or entry.size() is not None:
            remains += [entry.name] if entry.name not in (LOCK_NAME, VERIFIED_NAME) else []
        else:
            children = [child for child in entry.entries() if child.name != BRANCH_NAME]
            remains += [f"{entry.name}/{child.name}" for child in children if not is_unfinished(child)]
    if remains:
        raise CheckpointError(
            f"{checkpoints}: holds {names_text(remains, 5)}, but no committed checkpoint to resume from (a step-*"
            f" directory with a matching COMMIT, in {_searched(branches)}); remove it to start from scratch, or name"
            " another job.run_directory or checkpoint.load"
        )
    if branches and branches[0].parent and not is_from_scratch:
        raise CheckpointError(
            f"{checkpoints}: {branches[0].name} begins at step {branches[0].parent_step} of {branches[0].parent}, but"
            " no committed checkpoint is left there; remove it to start from scratch, or name another job.run_directory"
            " or checkpoint.load"
        )


def _searched(branches: Sequence[Branch]) -> str:
    """Return the branches in which checkpoints would have counted: "branch-0002, or main up to step 50"."""
    if not branches:
        return f"a branch, and no directory has a {BRANCH_NAME} file"
    parts = [branches[0].name]
    parts += [f"{member.parent} up to step {member.parent_step}" for member in branches if member.parent]
    return ", or ".join(parts)
