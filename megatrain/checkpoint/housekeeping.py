"""What the coordinator removes after a checkpoint: older ones that the job does not keep, and what was never finished.

Only the branch that is being written is touched, only what is older than its newest complete checkpoint, and never one
that is pinned or where another branch begins. One that lost its COMMIT stays as long as a whole one would. When
anything about that cannot be read, or the newest one is not whole when it is looked at again, nothing is removed. A
superseded round removes nothing: the newer one may resume from what it considers old.
"""

from __future__ import annotations

import time

from megatrain.checkpoint.persist_policy import is_abandoned
from megatrain.checkpoint.write_marks import WritingMark
from megatrain.contracts.arena_plans import HostPlan
from megatrain.contracts.branches import list_branches
from megatrain.contracts.checkpoint_files import (
    COMMIT_NAME,
    WRITING_NAME,
    commit_problem,
    is_pinned,
    lacks_only_commit,
    read_manifest,
    remove_checkpoint,
    step_directory_name,
    step_of,
    vouched_commit,
    wrong_files,
)
from megatrain.contracts.claims import Claims
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.lineage import Candidate, origins
from megatrain.contracts.location import Location
from megatrain.contracts.resume_point import known_damage
from megatrain.contracts.retention import to_remove
from megatrain.contracts.round_starts import is_late, newest_start, round_starts


class Housekeeping:
    """Remembers which checkpoints it keeps and why, so that a long run does not read them all after each."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, int], int] = {}
        self._lacking_commit: set[str] = set()

    def run(self, checkpoints: Location, plan: HostPlan) -> list[str]:
        """Return what was removed and what went wrong, a sentence each: the checkpoint is complete in any case."""
        said: list[str] = []
        known = set(self._lacking_commit)
        try:
            newer = Claims(checkpoints).newest_number()
            if newer > plan.round and _may_go_on_here(checkpoints, plan, newer):
                return [f"older checkpoints are left to round {newer}, which goes on in {plan.branch}"]
            for place in self._to_remove(checkpoints, plan):
                remove_checkpoint(place)
                self._lacking_commit.discard(str(place))
                said.append(f"removed {place}")
        except CheckpointError as error:
            said.append(f"older checkpoints are left: {error}")
        left = sorted(self._lacking_commit - known)
        return said + [f"left {place}: it lacks nothing but a COMMIT that vouches for it" for place in left]

    def _to_remove(self, checkpoints: Location, plan: HostPlan) -> list[Location]:
        branch = checkpoints / plan.branch
        found = sorted(step for entry in branch.entries() if (step := step_of(entry.name)) is not None)
        rounds = {step: number for step in found if (number := self._committed_by(branch, step)) is not None}
        starts = round_starts(checkpoints, plan.branch, min(rounds.values(), default=0))
        committed = [step for step, number in rounds.items() if not is_late(step, number, starts)]
        if not committed:
            return []
        newest = branch / step_directory_name(committed[-1])
        problem = commit_problem(newest) or next(iter(wrong_files(newest, read_manifest(newest))), None)
        if problem is not None:
            raise CheckpointError(f"the newest one is not whole: {problem}")
        outdated = _outdated(checkpoints, plan, committed)
        lacking: set[int] = set()
        for step in found:
            if step < committed[-1] and step not in committed:
                place = branch / step_directory_name(step)
                if step in rounds or self._lacks_only_commit(place, plan.branch):
                    lacking.add(step)
                elif _is_nobodys(place, plan):
                    outdated.append(step)
        if lacking:
            # this also ends removals that were cut short, which were begun for the same reason
            outdated += lacking.intersection(_outdated(checkpoints, plan, [*committed, *lacking]))
        places = [branch / step_directory_name(step) for step in sorted(outdated)]
        return [place for place in places if not is_pinned(place)]

    def _lacks_only_commit(self, directory: Location, branch: str) -> bool:
        name = str(directory)
        if name not in self._lacking_commit and lacks_only_commit(directory, branch):
            self._lacking_commit.add(name)
        return name in self._lacking_commit

    def _committed_by(self, branch: Location, step: int) -> int | None:
        key = (str(branch), step)
        if key not in self._rounds:
            commit = vouched_commit(branch / step_directory_name(step))
            if commit is None:
                return None
            self._rounds[key] = commit.round
        return self._rounds[key]


def _may_go_on_here(checkpoints: Location, plan: HostPlan, newest: int) -> bool:
    """Say whether a newer round goes on in this branch, or may do so, because it has not said where."""
    start = newest_start(checkpoints)
    return start is None or start.round < newest or start.branch == plan.branch


def _outdated(checkpoints: Location, plan: HostPlan, steps: list[int]) -> list[int]:
    """Return what retention does not keep of these steps, were all of them whole but those that were found damaged.

    A damaged one does not count among the newest `keep_last`, and goes when all of these are newer.
    """
    if not plan.keep_last:
        return []
    branch = checkpoints / plan.branch
    found = [Candidate(plan.branch, step, branch / step_directory_name(step)) for step in sorted(steps)]
    damaged = known_damage(checkpoints, found)
    whole = [one.step for one in found if (one.branch, one.step) not in damaged]
    oldest = min(whole[-plan.keep_last :], default=0)
    newest = {step for step in steps if step >= oldest}
    needed = origins(list_branches(checkpoints), plan.branch, sorted(steps))
    return to_remove(steps, newest, needed, plan.keep_last, plan.keep_every)


def _is_nobodys(directory: Location, plan: HostPlan) -> bool:
    if (directory / COMMIT_NAME).exists():
        # damaged, and somebody may want to mend it
        return False
    if {entry.name for entry in directory.entries()} <= {WRITING_NAME}:
        # an attempt that was given up; one that has just begun begins again
        return True
    return is_abandoned(WritingMark.read(directory), plan, time.time())
