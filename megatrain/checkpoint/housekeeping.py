"""The cleanup after each checkpoint: it removes older checkpoints that the job does not keep, and unfinished ones.

It runs in the writer on the host of rank 0. It removes only checkpoints of the branch that is being written, and only
those older than the branch's newest complete one. It never removes a checkpoint that is pinned or from which another
branch begins. A checkpoint that lost its COMMIT is removed by the same rule as a committed one. If a file that this
decision needs cannot be read, or the newest checkpoint is not complete, nothing is removed. A superseded round removes
nothing, because the newer round may resume from a checkpoint that is old for this round. The cleanup also completes
removals that another process has begun and not completed (removals.py).
"""

from __future__ import annotations

import time

from megatrain.arena.plans import HostPlan
from megatrain.checkpoint.persist_policy import is_abandoned
from megatrain.checkpoint.write_marks import WritingMark
from megatrain.checkpoint_format.branches import list_branches
from megatrain.checkpoint_format.checkpoint_files import is_pinned, lacks_only_commit, read_manifest, wrong_files
from megatrain.checkpoint_format.checkpoint_names import COMMIT_NAME, WRITING_NAME, step_directory_name, step_of
from megatrain.checkpoint_format.claims import Claims
from megatrain.checkpoint_format.commit import commit_problem, matching_commit
from megatrain.checkpoint_format.lineage import Candidate, origins
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.removals import Remover, being_removed
from megatrain.checkpoint_format.resume_point import known_damage
from megatrain.checkpoint_format.retention import to_remove
from megatrain.checkpoint_format.round_starts import is_superseded, newest_start, round_starts
from megatrain.contracts.errors import CheckpointError, NewerRoundError


class Housekeeping:
    """Runs the cleanup. It caches what it read, so that a long run does not reread all checkpoints after each save."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, int], int] = {}
        self._lacking_commit: set[str] = set()
        self._remover = Remover()

    def run(self, checkpoints: Location, plan: HostPlan) -> list[str]:
        """Remove old checkpoints; return a sentence for each removal and failure. A failure raises no error."""
        notes: list[str] = []
        known = set(self._lacking_commit)
        try:
            newest = Claims(checkpoints).newest_number()
            if newest > plan.round and _may_resume_here(checkpoints, plan, newest):
                return [f"older checkpoints are left to round {newest}, which continues {plan.branch}"]
            chosen = [(plan.branch, step) for step in self._to_remove(checkpoints, plan)]
            for location in self._remover.remove(checkpoints, chosen, newest):
                self._lacking_commit.discard(str(location))
                notes.append(f"removed {location}")
        except NewerRoundError as error:
            return [f"older checkpoints are kept for now: {error}"]
        except CheckpointError as error:
            notes.append(f"older checkpoints were not removed: {error}")
        left = sorted(self._lacking_commit - known)
        return notes + [f"kept {location}: it is complete except for a matching COMMIT" for location in left]

    def _to_remove(self, checkpoints: Location, plan: HostPlan) -> list[int]:
        """Return the steps to remove of the branch that is being written, ascending."""
        branch = checkpoints / plan.branch
        present = sorted(step for entry in branch.entries() if (step := step_of(entry.name)) is not None)
        begun = {step for name, step in being_removed(checkpoints) if name == plan.branch}
        found = [step for step in present if step not in begun]
        rounds = {step: number for step in found if (number := self._committed_by(branch, step)) is not None}
        starts = round_starts(checkpoints, plan.branch, min(rounds.values(), default=0))
        committed = [step for step, number in rounds.items() if not is_superseded(step, number, starts)]
        if not committed:
            return []
        newest = branch / step_directory_name(committed[-1])
        problem = commit_problem(newest) or next(iter(wrong_files(newest, read_manifest(newest))), None)
        if problem is not None:
            raise CheckpointError(f"the newest one is not complete: {problem}")
        outdated = _outdated(checkpoints, plan, committed)
        outdated += [step for step in begun.intersection(present) if step < committed[-1]]
        lacking: set[int] = set()
        for step in found:
            if step < committed[-1] and step not in committed:
                location = branch / step_directory_name(step)
                if step in rounds or self._lacks_only_commit(location, plan.branch):
                    lacking.add(step)
                elif _is_unclaimed(location, plan):
                    outdated.append(step)
        if lacking:
            # this also completes interrupted removals: the same rule chose their steps
            outdated += lacking.intersection(_outdated(checkpoints, plan, [*committed, *lacking]))
        return [step for step in sorted(outdated) if not is_pinned(branch / step_directory_name(step))]

    def _lacks_only_commit(self, directory: Location, branch: str) -> bool:
        name = str(directory)
        if name not in self._lacking_commit and lacks_only_commit(directory, branch):
            self._lacking_commit.add(name)
        return name in self._lacking_commit

    def _committed_by(self, branch: Location, step: int) -> int | None:
        key = (str(branch), step)
        if key not in self._rounds:
            commit = matching_commit(branch / step_directory_name(step))
            if commit is None:
                return None
            self._rounds[key] = commit.round
        return self._rounds[key]


def _may_resume_here(checkpoints: Location, plan: HostPlan, newest: int) -> bool:
    """Return whether a newer round resumes in this branch, or may do so because it has not recorded its branch."""
    start = newest_start(checkpoints)
    return start is None or start.round < newest or start.branch == plan.branch


def _outdated(checkpoints: Location, plan: HostPlan, steps: list[int]) -> list[int]:
    """Return the steps that retention does not keep, assuming that only those with known damage are damaged.

    A damaged checkpoint does not count among the newest `keep_last`, and is removed when all those are newer than it.
    """
    if not plan.keep_last:
        return []
    branch = checkpoints / plan.branch
    found = [Candidate(plan.branch, step, branch / step_directory_name(step)) for step in sorted(steps)]
    damaged = known_damage(checkpoints, found)
    whole = [candidate.step for candidate in found if (candidate.branch, candidate.step) not in damaged]
    oldest = min(whole[-plan.keep_last :], default=0)
    newest = {step for step in steps if step >= oldest}
    needed = origins(list_branches(checkpoints), plan.branch, sorted(steps))
    return to_remove(steps, newest | needed, plan.keep_last, plan.keep_every)


def _is_unclaimed(directory: Location, plan: HostPlan) -> bool:
    if (directory / COMMIT_NAME).exists():
        # a damaged checkpoint, which a user may want to repair
        return False
    if {entry.name for entry in directory.entries()} <= {WRITING_NAME}:
        # an abandoned attempt; a writer that has just begun one writes WRITING again
        return True
    return is_abandoned(WritingMark.read(directory), plan, time.time())
