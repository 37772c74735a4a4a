"""Branches of a run's checkpoints, and where the run goes on.

    claims/00000012         round 12 claims to write here: claims.py
    claims/00000012.resume  where it went on: branch and step; the newest says where the run goes on
    main/BRANCH             where a branch comes from: its parent and the parent's step
    main/step-...           its checkpoints

A round is the number of a claim. What an older round commits after a newer one went on from before it, is late: it was
not there when the newer one looked, and counts for nothing. Before rounds claimed, RESUME named the current branch.

Going back to an older step never removes or overtakes anything: it opens another branch, which begins at that step of
its parent. What the parent did after that step is abandoned and is never "newest" again. BRANCH is written first and
where the run goes on last, each whole or not at all, so a crash in between leaves the run where it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatrain.contracts.branches import (
    BRANCH_NAME,
    MAIN_BRANCH,
    Branch,
    branch_name_of,
    branch_names,
    is_branch_name,
    line_of,
    next_branch_name,
    read_branch,
    write_branch,
)
from megatrain.contracts.checkpoint_files import (
    committed_rounds,
    is_committed,
    is_unfinished,
    step_directory_name,
    step_of,
)
from megatrain.contracts.claims import CLAIMS_NAME, Claims
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.json_object import JsonObject
from megatrain.contracts.location import Location
from megatrain.contracts.round_starts import (
    RoundStart,
    begin_round,
    is_late,
    newest_start,
    round_starts,
    start_place,
    started_rounds,
)
from megatrain.contracts.sample_ranges import SampleRanges, merged
from megatrain.contracts.verifications import VERIFIED_NAME

RESUME_NAME = "RESUME"
LOCK_NAME = "LOCK"
"""Held by the run that saves in a checkpoint.directory of its own."""
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A committed checkpoint that a run may go on from."""

    branch: str
    step: int
    location: Location


def current_branch(checkpoints: Location) -> str:
    """Return the branch that the run goes on with: the newest round's, before there were any RESUME's.

    Without either it is the only one, and "main" before the first.
    Raises: CheckpointError when what names it is damaged, names a branch that is not there, or is missing beside
    several.
    """
    start = newest_start(checkpoints)
    names = branch_names(checkpoints)
    if start is not None:
        if start.branch not in names:
            raise CheckpointError(
                f"{start_place(checkpoints, start.round)}: branch={start.branch!r}, but"
                f" {checkpoints / start.branch / BRANCH_NAME} is missing; name another there, or bring it back"
            )
        return start.branch
    place = checkpoints / RESUME_NAME
    listed = ", ".join(names) or "none"
    mend = f'it must name the branch to go on with, as {{"schema_version": 1, "branch": "main"}} (there are: {listed})'
    try:
        content = place.read()
    except MissingFileError as error:
        if len(names) > 1:
            raise CheckpointError(f"{place} is missing; {mend}") from error
        return names[0] if names else MAIN_BRANCH
    reader = JsonObject.parse(content, str(place), SCHEMA_VERSION, mend)
    name = branch_name_of(reader, "branch")
    if name not in names:
        raise reader.error("branch", f"{checkpoints / name / BRANCH_NAME} is missing; {mend}")
    return name


def candidates(checkpoints: Location, branch: str | None = None) -> list[Candidate]:
    """Return the committed checkpoints that a run may go on from, best first.

    First come the current branch's, newest first, then its parent's up to the step where the branch left, and so on.
    `branch` asks the same of another branch. The list is empty only where nothing was ever saved; a first checkpoint
    that was never finished was not, see `unfinished`.
    Raises: CheckpointError when there is something but nothing committed, or the lineage is damaged.
    """
    name = current_branch(checkpoints) if branch is None else branch
    line = line_of(checkpoints, name) if branch is not None or name in branch_names(checkpoints) else []
    found = [
        _candidate(checkpoints, name, step)
        for name, limit in _reaches(line)
        for step in reversed(steps_that_count(checkpoints, name))
        if step <= limit
    ]
    if not found:
        _check_nothing_was_saved(checkpoints, line)
    return found


def steps_that_count(checkpoints: Location, branch: str) -> list[int]:
    """Return the steps of a branch's committed checkpoints that are not late, ascending.

    Raises: CheckpointError when something cannot be read.
    """
    rounds = committed_rounds(checkpoints / branch)
    starts = round_starts(checkpoints, branch, min(rounds.values())) if rounds else []
    return [step for step, round_number in sorted(rounds.items()) if not is_late(step, round_number, starts)]


def skipped_samples(line: Sequence[Branch]) -> SampleRanges:
    """Return the samples that a branch leaves out, and its parents before it."""
    return merged(one for member in line for one in member.skipped)


def overlooked(checkpoints: Location, best: Candidate) -> list[Candidate]:
    """Return what would come before `best`, had it not lost its COMMIT, or the manifest that COMMIT vouches for.

    It was complete once, or somebody put it there: whoever goes on from `best` must say so.
    Raises: CheckpointError when the lineage is damaged or something cannot be read.
    """
    found: list[Candidate] = []
    for name, limit in _reaches(line_of(checkpoints, current_branch(checkpoints))):
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


def _reaches(line: Sequence[Branch]) -> Iterator[tuple[str, float]]:
    """Yield each branch of a line with the last of its steps that belongs to the line."""
    limit = math.inf
    for member in line:
        yield member.name, limit
        if member.parent_step is not None:
            # a parent that left its own parent earlier does not reach beyond that
            limit = min(limit, member.parent_step)


def _candidate(checkpoints: Location, branch: str, step: int) -> Candidate:
    return Candidate(branch, step, checkpoints / branch / step_directory_name(step))


def unfinished(checkpoints: Location) -> list[Location]:
    """Return the checkpoints of all branches that were begun and never complete: being written, or left behind."""
    return [
        place
        for name in branch_names(checkpoints)
        for place in (checkpoints / name).entries()
        if is_unfinished(place) and place.entries()
    ]


def origins(line: Sequence[Branch], branch: str, steps: Sequence[int]) -> set[int]:
    """Return those of a branch's committed `steps` at which another branch of the line begins."""
    starts = [
        [step for step in steps if member.parent_step is not None and step <= member.parent_step]
        for member in line
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
    skipped: SampleRanges = (),
    round_number: int | None = None,
) -> Branch:
    """Begin a branch at a step of its parent and make it the one that the run goes on with.

    The first branch of a run, "main", has parent "" and parent_step None. The step need not be committed: a run may go
    on from memory. `rollback`, `skipped`: as in Branch. `round_number`: what the caller has claimed; else it is claimed
    here.
    Raises: CheckpointError when the parent is not there, when none is given although there is a run, or when writing
    fails.
    """
    if bool(parent) != (parent_step is not None):
        raise ValueError(f"parent={parent!r} and parent_step={parent_step}: both or neither")
    names, has_resume = branch_names(checkpoints), _has_resume(checkpoints)
    if not parent and (names or has_resume):
        listed = ", ".join([RESUME_NAME, *names] if has_resume else names)
        raise CheckpointError(f"{checkpoints}: holds a run already ({listed}); a new branch of it needs a parent")
    if parent:
        read_branch(checkpoints, parent)
        if round_number is None:
            round_number = Claims(checkpoints).take(None, _next_round(checkpoints, names)).number
        if len(names) == 1 and not has_resume:
            # one branch needs none, but two would leave the place of the run unclear
            begin_round(checkpoints, RoundStart(round_number, names[0], None))
    while True:
        branch = Branch(
            next_branch_name(checkpoints) if parent else MAIN_BRANCH,
            parent,
            parent_step,
            time.time(),
            reason,
            rollback,
            skipped,
        )
        if write_branch(checkpoints, branch):
            break
    if round_number is not None:
        begin_round(checkpoints, RoundStart(round_number, branch.name, parent_step))
    return branch


def _has_resume(checkpoints: Location) -> bool:
    return bool(started_rounds(checkpoints)) or (checkpoints / RESUME_NAME).exists()


def _next_round(checkpoints: Location, names: Sequence[str]) -> int:
    """Return a number above all rounds that have committed anything."""
    return 1 + max((number for name in names for number in committed_rounds(checkpoints / name).values()), default=0)


def ensure_branch(checkpoints: Location, reason: str) -> str:
    """Return the branch that the run goes on with; open "main" where there is none.

    Raises: CheckpointError as `current_branch` and `open_branch` do.
    """
    if not branch_names(checkpoints) and not _has_resume(checkpoints):
        return open_branch(checkpoints, "", None, reason).name
    return current_branch(checkpoints)


def _check_nothing_was_saved(checkpoints: Location, line: Sequence[Branch]) -> None:
    """Refuse to call it a fresh start when anything lies about: that would be a silent loss of a run."""
    flat, remains = [], []
    # a job that went back to before its first step abandoned all that its other branches have
    is_anew = bool(line) and line[0].parent_step == 0
    for entry in [checkpoints / line[0].name] if is_anew else checkpoints.entries():
        if entry.name == CLAIMS_NAME:
            continue
        if step_of(entry.name) is not None:
            flat.append(entry.name)
        elif not is_branch_name(entry.name) or entry.size() is not None:
            remains += [entry.name] if entry.name not in (RESUME_NAME, LOCK_NAME, VERIFIED_NAME) else []
        else:
            children = [child for child in entry.entries() if child.name != BRANCH_NAME]
            remains += [f"{entry.name}/{child.name}" for child in children if not is_unfinished(child)]
    if flat:
        raise CheckpointError(
            f"{checkpoints}: holds {_shortened(flat)}, as an older format of checkpoints did; this program keeps them"
            f" in branches ({MAIN_BRANCH}/{flat[0]}), with another manifest. Go on with the program that wrote them, or"
            " name another job.run_directory"
        )
    if remains:
        raise CheckpointError(
            f"{checkpoints}: holds {_shortened(remains)}, but no committed checkpoint to go on from (a step-* directory"
            f" with a matching COMMIT, in {_searched(line)}); remove it to start from scratch, or name another"
            " job.run_directory or checkpoint.load"
        )
    if line and line[0].parent and not is_anew:
        raise CheckpointError(
            f"{checkpoints}: {line[0].name} goes on from step {line[0].parent_step} of {line[0].parent}, but no"
            " committed checkpoint is left there; remove it to start from scratch, or name another job.run_directory"
            " or checkpoint.load"
        )


def _searched(line: Sequence[Branch]) -> str:
    """Return where checkpoints would have counted: "branch-0002, or main up to step 50"."""
    if not line:
        return f"a branch, and no directory has a {BRANCH_NAME} file"
    parts = [line[0].name]
    parts += [f"{member.parent} up to step {member.parent_step}" for member in line if member.parent]
    return ", or ".join(parts)


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (" and more" if len(names) > 5 else "")
