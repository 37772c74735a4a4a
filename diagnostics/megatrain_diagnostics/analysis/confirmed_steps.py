"""Confirms steps: a step is confirmed when a second rank has reported it, or a later one.

All ranks of a job are at the same step, or at neighboring steps. A single rank that reports a step thousands ahead is
wrong, and must not make all earlier steps outdated.
"""

from __future__ import annotations

import numpy as np

from megatrain_diagnostics.events.tables import Int32, Int64


def steps_of_several_ranks(steps: Int64) -> Int64:
    """Return the different steps, ascending, without those that only one rank reports if several ranks report others.

    steps: one entry for each rank and step that it reports.
    """
    found, num_ranks = np.unique(steps, return_counts=True)
    reported: Int64 = found[num_ranks >= min(2, num_ranks.max(initial=1))]
    return reported


class ConfirmedSteps:
    """The newest step of each rank of one round."""

    def __init__(self, num_ranks: int) -> None:
        """`num_ranks`: number of ranks of the round; if it is 1, every step is confirmed."""
        self.num_needed = min(2, num_ranks)
        self._step_of_rank: Int64 = np.full(0, -1, dtype=np.int64)

    def add(self, ranks: Int32, steps: Int32) -> None:
        """Add reported steps. Shapes: both [rows]; ranks are not negative."""
        if not len(ranks):
            return
        missing = int(ranks.max()) + 1 - len(self._step_of_rank)
        if missing > 0:
            self._step_of_rank = np.concatenate([self._step_of_rank, np.full(missing, -1, dtype=np.int64)])
        np.maximum.at(self._step_of_rank, ranks, steps.astype(np.int64))

    @property
    def newest(self) -> int:
        """The newest step that at least `num_needed` ranks have reached; -1: none."""
        place = len(self._step_of_rank) - self.num_needed
        return -1 if place < 0 else int(np.partition(self._step_of_rank, place)[place])
