"""Confirms steps: a step counts when a second rank reports it too.

All ranks of a job are at one step, or at neighbouring steps. A single rank that reports a step thousands ahead is
wrong, and must not make all earlier steps count as old.
"""

from __future__ import annotations

import numpy as np

from megatrain_diagnostics.events.tables import Int32, Int64


class ConfirmedSteps:
    """The newest step of each rank of one round."""

    def __init__(self, num_ranks: int) -> None:
        """`num_ranks`: of the round; with a single rank every step is confirmed."""
        self.num_needed = min(2, num_ranks)
        self._step_of_rank: Int64 = np.full(0, -1, dtype=np.int64)

    def add(self, ranks: Int32, steps: Int32) -> None:
        """Add reported steps. Shapes: both [rows], of ranks from 0 on."""
        if not len(ranks):
            return
        missing = int(ranks.max()) + 1 - len(self._step_of_rank)
        if missing > 0:
            self._step_of_rank = np.concatenate([self._step_of_rank, np.full(missing, -1, dtype=np.int64)])
        np.maximum.at(self._step_of_rank, ranks, steps.astype(np.int64))

    @property
    def newest(self) -> int:
        """The newest step that as many ranks as needed have reached; -1: none."""
        place = len(self._step_of_rank) - self.num_needed
        return -1 if place < 0 else int(np.partition(self._step_of_rank, place)[place])
