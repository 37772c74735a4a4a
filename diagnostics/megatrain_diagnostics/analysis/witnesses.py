"""Which steps are confirmed: those that a second rank reports, too.

All ranks of a job are at one step, or at neighbours of it. A single rank that says it is thousands of steps ahead has
made that up, and must not have everything before it pass for old.
"""

from __future__ import annotations

import numpy as np

from megatrain_diagnostics.events.tables import Int32, Int64


class Witnesses:
    """The newest step of each rank of one round."""

    def __init__(self, num_ranks: int) -> None:
        """`num_ranks`: of the round; with a single rank every step is confirmed."""
        self.num_needed = min(2, num_ranks)
        self._newest: Int64 = np.full(0, -1, dtype=np.int64)

    def add(self, ranks: Int32, steps: Int32) -> None:
        """Take what ranks tell. Shapes: both [rows], of ranks from 0 on."""
        if not len(ranks):
            return
        missing = int(ranks.max()) + 1 - len(self._newest)
        if missing > 0:
            self._newest = np.concatenate([self._newest, np.full(missing, -1, dtype=np.int64)])
        np.maximum.at(self._newest, ranks, steps.astype(np.int64))

    @property
    def believed(self) -> int:
        """The newest step that as many ranks as are needed have reached; -1: none."""
        place = len(self._newest) - self.num_needed
        return -1 if place < 0 else int(np.partition(self._newest, place)[place])
