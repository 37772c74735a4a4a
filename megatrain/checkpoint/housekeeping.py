"""What the coordinator removes after a checkpoint: older ones that the job does not keep, and what was never finished.

Only the branch that is being written is touched, only what is older than its newest complete checkpoint, and never one
that is pinned or where another branch begins. One that lost its COMMIT stays as long as a whole one would. When
anything about that cannot be read, nothing is removed.
"""

from __future__ import annotations

import time

from megatrain.checkpoint.persist_policy import is_abandoned
from megatrain.checkpoint.write_marks import WritingMark
from megatrain.contracts.arena_plans import HostPlan
from megatrain.contracts.checkpoint_files import (
    COMMIT_NAME,
    is_committed,
    is_pinned,
    lacks_only_commit,
    remove_checkpoint,
    step_directory_name,
    step_of,
)
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.lineage import list_branches, origins
from megatrain.contracts.location import Location
from megatrain.contracts.retention import to_remove


class Housekeeping:
    """Remembers which checkpoints it keeps and why, so that a long run does not read them all after each."""

    def __init__(self) -> None:
        self._committed: set[tuple[str, int]] = set()
        self._lacking_commit: set[str] = set()

    def run(self, checkpoints: Location, plan: HostPlan) -> list[str]:
        """Return what was removed and what went wrong, a sentence each: the checkpoint is complete in any case."""
        said: list[str] = []
        known = set(self._lacking_commit)
        try:
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
        committed = [step for step in found if self._is_committed(branch, step)]
        if not committed:
            return []
        outdated = _outdated(checkpoints, plan, committed)
        lacking: set[int] = set()
        for step in found:
            if step < committed[-1] and step not in committed:
                place = branch / step_directory_name(step)
                if self._lacks_only_commit(place, plan.branch):
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

    def _is_committed(self, branch: Location, step: int) -> bool:
        key = (str(branch), step)
        if key not in self._committed and is_committed(branch / step_directory_name(step)):
            self._committed.add(key)
        return key in self._committed


def _outdated(checkpoints: Location, plan: HostPlan, steps: list[int]) -> list[int]:
    """Return what retention does not keep of these steps, were all of them whole."""
    needed = origins(list_branches(checkpoints), plan.branch, sorted(steps)) if plan.keep_last else set()
    return to_remove(steps, set(), needed, plan.keep_last, plan.keep_every)


def _is_nobodys(directory: Location, plan: HostPlan) -> bool:
    if (directory / COMMIT_NAME).exists():
        # damaged, and somebody may want to mend it
        return False
    return is_abandoned(WritingMark.read(directory), plan, time.time())
