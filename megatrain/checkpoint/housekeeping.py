"""What the coordinator removes after a checkpoint: older ones that the job does not keep, and what was never finished.

Only the branch that is being written is touched, only what is older than its newest complete checkpoint, and never one
that is pinned or where another branch begins. When anything about that cannot be read, nothing is removed.
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
    remove_checkpoint,
    step_directory_name,
    step_of,
)
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.lineage import list_branches, origins
from megatrain.contracts.location import Location
from megatrain.contracts.retention import to_remove


class Housekeeping:
    """Remembers which checkpoints are complete, so that a long run does not read them all after each."""

    def __init__(self) -> None:
        self._committed: set[tuple[str, int]] = set()

    def run(self, checkpoints: Location, plan: HostPlan) -> list[str]:
        """Return what was removed and what went wrong, a sentence each: the checkpoint is complete in any case."""
        said: list[str] = []
        try:
            for place in self._to_remove(checkpoints, plan):
                remove_checkpoint(place)
                said.append(f"removed {place}")
        except CheckpointError as error:
            said.append(f"older checkpoints are left: {error}")
        return said

    def _to_remove(self, checkpoints: Location, plan: HostPlan) -> list[Location]:
        branch = checkpoints / plan.branch
        found = sorted(step for entry in branch.entries() if (step := step_of(entry.name)) is not None)
        committed = [step for step in found if self._is_committed(branch, step)]
        if not committed:
            return []
        needed = origins(list_branches(checkpoints), plan.branch, committed) if plan.keep_last else set()
        steps = to_remove(committed, set(), needed, plan.keep_last, plan.keep_every)
        places = [branch / step_directory_name(step) for step in steps]
        kept = [place for place in places if not is_pinned(place)]
        rest = [branch / step_directory_name(step) for step in found if step < committed[-1] and step not in committed]
        return kept + [place for place in rest if _is_nobodys(place, plan)]

    def _is_committed(self, branch: Location, step: int) -> bool:
        key = (str(branch), step)
        if key not in self._committed and is_committed(branch / step_directory_name(step)):
            self._committed.add(key)
        return key in self._committed


def _is_nobodys(directory: Location, plan: HostPlan) -> bool:
    if (directory / COMMIT_NAME).exists() or is_pinned(directory):
        # damaged, and somebody may want to mend it
        return False
    return is_abandoned(WritingMark.read(directory), plan, time.time())
