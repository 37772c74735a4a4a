"""The steps that were compared, in arrays of fixed size: own time by aspect, excess over peers, and the network.

Kept are the newest, which are judged, and the first of the round, which say how it was: a slowness that lasts
does not become the measure of itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.layout import Layout
from megatrain.contracts.operations import Operation
from megatrain_diagnostics.analysis.own_time import Aspect, aspects, scale_of, typical_step_s
from megatrain_diagnostics.analysis.peers import Flags, Floats, Peers
from megatrain_diagnostics.analysis.step_ring import WORK_KINDS, StepRow
from megatrain_diagnostics.events.roster import groups_along
from megatrain_diagnostics.events.tables import Int64

_NUM_ASPECTS = len(Aspect)
DP_TRANSFERS = (Operation.GRADS_REDUCE_SCATTER.number, Operation.PARAMS_ALL_GATHER.number)
TP_TRANSFERS = (
    Operation.TP_ALL_GATHER.number,
    Operation.TP_REDUCE_SCATTER.number,
    Operation.TP_ALL_REDUCE.number,
)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Consecutive compared steps, oldest first.

    Shapes: own and excess [steps, aspects, ranks]; scale and has_come [steps, ranks]; work [steps, kinds, ranks];
    dp_transfer_s [steps, stages, tp], tp_transfer_s [steps, stages, dp]: of the rank of a group that waited least.
    """

    steps: NDArray[np.int64]
    own: NDArray[np.float32]
    excess: NDArray[np.float32]
    scale: NDArray[np.float32]
    work: NDArray[np.float64]
    has_come: Flags
    step_s: NDArray[np.float64]
    dp_transfer_s: NDArray[np.float64]
    tp_transfer_s: NDArray[np.float64]

    @property
    def anybody_came(self) -> Flags:
        """Return the ranks of which anything came. Shapes: [ranks]."""
        found: Flags = np.any(self.has_come, axis=0)
        return found

    def last(self, count: int) -> Window:
        part = slice(max(0, len(self.steps) - count), None)
        return Window(
            *(self.steps[part], self.own[part], self.excess[part], self.scale[part], self.work[part]),
            *(self.has_come[part], self.step_s[part], self.dp_transfer_s[part], self.tp_transfer_s[part]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One aspect of one rank, oldest step first. Shapes: all [steps]. Units: seconds."""

    steps: NDArray[np.int64]
    excess: NDArray[np.float32]
    scale: NDArray[np.float32]


class History:
    """Keeps the newest `num_steps` compared steps, and the first `num_first`."""

    def __init__(self, layout: Layout, num_steps: int, num_first: int) -> None:
        ranks = layout.world_size
        self._of_dp, self._of_tp = groups_along(layout, "dp"), groups_along(layout, "tp")
        self._num_steps = num_steps
        self._num_first = num_first
        self._first: Window | None = None
        self._count = 0
        self._steps = np.zeros(num_steps, dtype=np.int64)
        self._own: NDArray[np.float32] = np.zeros((num_steps, _NUM_ASPECTS, ranks), dtype=np.float32)
        self._excess: NDArray[np.float32] = np.zeros_like(self._own)
        self._scale: NDArray[np.float32] = np.ones((num_steps, ranks), dtype=np.float32)
        self._work = np.zeros((num_steps, len(WORK_KINDS), ranks))
        self._has_come = np.zeros((num_steps, ranks), dtype=bool)
        self._step_s = np.zeros(num_steps)
        self._dp_transfer_s = np.zeros((num_steps, *self._of_dp.shape[:2]))
        self._tp_transfer_s = np.zeros((num_steps, *self._of_tp.shape[:2]))

    def __len__(self) -> int:
        return min(self._count, self._num_steps)

    def add(self, row: StepRow, peers: Peers) -> None:
        """Compare a step with itself: each rank with its peers."""
        own, slot = aspects(row), self._count % self._num_steps
        step_s = typical_step_s(row)
        reference = peers.reference(own, row.has_come)
        self._steps[slot] = row.step
        self._own[slot] = own
        self._excess[slot] = np.where(row.has_come, own - reference.median, 0.0)
        self._scale[slot] = scale_of(peers.stage_medians(own[Aspect.COMPUTE], row.has_come), peers.stage_of, step_s)
        self._work[slot] = row.work
        self._has_come[slot] = row.has_come
        self._step_s[slot] = step_s
        self._dp_transfer_s[slot] = _least(row.sum_of(DP_TRANSFERS), row.has_come, self._of_dp)
        self._tp_transfer_s[slot] = _least(row.sum_of(TP_TRANSFERS), row.has_come, self._of_tp)
        self._count += 1
        if self._count == self._num_first:
            self._first = self.window(self._num_first)

    @property
    def past(self) -> Window:
        """Return the first steps of the round; none until there are others than these to compare them with."""
        if self._first is None or self._count < self._num_first + self._num_first // 2:
            return self.window(0)
        return self._first

    def trace(self, aspect: Aspect, rank: int) -> Trace:
        """Return how one rank did in all kept steps."""
        slots = self._newest(self._num_steps)
        return Trace(self._steps[slots], self._excess[slots, aspect, rank], self._scale[slots, rank])

    def window(self, count: int) -> Window:
        """Return the newest steps, at most `count`."""
        slots = self._newest(count)
        return Window(
            *(self._steps[slots], self._own[slots], self._excess[slots], self._scale[slots], self._work[slots]),
            *(self._has_come[slots], self._step_s[slots], self._dp_transfer_s[slots], self._tp_transfer_s[slots]),
        )

    def _newest(self, count: int) -> NDArray[np.int64]:
        return np.arange(self._count - min(count, len(self)), self._count) % self._num_steps


def _least(seconds: Floats, has_come: Flags, groups: Int64) -> Floats:
    """Return what the rank of each group took that came last: nearly the transfer alone. 0 where no rank came."""
    least = np.where(has_come, seconds, np.inf)[groups].min(axis=-1)
    found: Floats = np.where(np.isfinite(least), least, 0.0)
    return found
