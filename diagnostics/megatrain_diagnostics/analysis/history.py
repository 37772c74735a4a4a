"""Keeps compared steps in arrays of fixed size: own time by aspect, excess over peers, and transfer times.

The newest steps are kept for the detection of stragglers, and the first steps of the round as the baseline, so that a
lasting slowness does not become its own baseline.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.black_box.operations import REPLICA_COLLECTIVES, TP_COLLECTIVES, Operation
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.analysis.own_time import Aspect, aspects, computed, per_pass, scale_of, typical_step_s
from megatrain_diagnostics.analysis.peers import Peers
from megatrain_diagnostics.analysis.step_ring import WORK_KINDS, StepRow
from megatrain_diagnostics.events.roster import groups_along, replica_groups
from megatrain_diagnostics.events.tables import Flags, Float64, Int64

_READS = (Operation.DATA_READ, Operation.PICTURE_WAIT)


@dataclass(frozen=True, slots=True, eq=False)
class ComparedSteps:
    """Consecutive compared steps, oldest first.

    Shapes: own and excess [steps, aspects, ranks]; computed, per_pass, scale and has_reported [steps, ranks]; work
    [steps, kinds, ranks]; reads_s [steps, 2, ranks]; dp_transfer_s [steps, stages, replica groups of a stage],
    tp_transfer_s [steps, stages, tp groups of a stage]: least time of a rank in each group. Units: `own`, `excess` and
    `scale` are seconds per step.
    """

    steps: NDArray[np.int64]
    own: NDArray[np.float32]
    computed: NDArray[np.float32]
    """Seconds of compute for each rank's own number of passes; `own` is scaled to the median number of passes."""
    per_pass: NDArray[np.float32]
    """The median number of passes divided by the rank's own number."""
    excess: NDArray[np.float32]
    scale: NDArray[np.float32]
    work: NDArray[np.float64]
    reads_s: NDArray[np.float32]
    """Seconds of the loader's reads, and of their waits for producers of pictures."""
    has_reported: Flags
    step_s: NDArray[np.float64]
    dp_transfer_s: NDArray[np.float64]
    tp_transfer_s: NDArray[np.float64]

    @property
    def any_reported(self) -> Flags:
        """Return the ranks that reported any step. Shapes: [ranks]."""
        found: Flags = np.any(self.has_reported, axis=0)
        return found

    def at(self, steps: slice | Int64) -> ComparedSteps:
        """Return the steps with these indices."""
        return ComparedSteps(*(getattr(self, field.name)[steps] for field in fields(self)))

    def last(self, count: int) -> ComparedSteps:
        return self.at(slice(max(0, len(self.steps) - count), None))


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One aspect of one rank, oldest step first. Shapes: all [steps]. Units: seconds."""

    steps: NDArray[np.int64]
    excess: NDArray[np.float32]
    scale: NDArray[np.float32]


class StepHistory:
    """Keeps the newest `num_steps` compared steps, and the first `num_first`."""

    def __init__(self, layout: Layout, num_steps: int, num_first: int) -> None:
        ranks = layout.world_size
        self._of_dp, self._of_tp = replica_groups(layout), groups_along(layout, "tp")
        self._num_steps = num_steps
        self._num_first = num_first
        self._first: ComparedSteps | None = None
        self._count = 0

        def zeros(*shape: int, dtype: type[np.generic] = np.float32) -> NDArray[Any]:
            return np.zeros((num_steps, *shape), dtype)

        self._kept = ComparedSteps(
            steps=zeros(dtype=np.int64),
            own=zeros(len(Aspect), ranks),
            computed=zeros(ranks),
            per_pass=zeros(ranks),
            excess=zeros(len(Aspect), ranks),
            scale=zeros(ranks),
            work=zeros(len(WORK_KINDS), ranks, dtype=np.float64),
            reads_s=zeros(len(_READS), ranks),
            has_reported=zeros(ranks, dtype=np.bool_),
            step_s=zeros(dtype=np.float64),
            dp_transfer_s=zeros(*self._of_dp.shape[:2], dtype=np.float64),
            tp_transfer_s=zeros(*self._of_tp.shape[:2], dtype=np.float64),
        )
        """A ring: the n-th compared step, counted from 0, is at n mod `num_steps`."""

    def __len__(self) -> int:
        return min(self._count, self._num_steps)

    def add(self, row: StepRow, peers: Peers) -> None:
        """Add a step, comparing each rank with its peers."""
        own, slot, kept = aspects(row), self._count % self._num_steps, self._kept
        step_s = typical_step_s(row)
        reference = peers.reference(own, row.has_reported)
        kept.steps[slot] = row.step
        kept.own[slot] = own
        kept.computed[slot], kept.per_pass[slot] = computed(row), per_pass(row.num_forwards)
        kept.excess[slot] = np.where(row.has_reported, own - reference.median, 0.0)
        kept.scale[slot] = scale_of(peers.stage_medians(own[Aspect.COMPUTE], row.has_reported), peers.stage_of, step_s)
        kept.work[slot] = row.work * kept.per_pass[slot]
        kept.reads_s[slot] = [row.of(operation) for operation in _READS]
        kept.has_reported[slot] = row.has_reported
        kept.step_s[slot] = step_s
        kept.dp_transfer_s[slot] = _least(row.of(*REPLICA_COLLECTIVES), row.has_reported, self._of_dp)
        kept.tp_transfer_s[slot] = _least(row.of(*TP_COLLECTIVES), row.has_reported, self._of_tp)
        self._count += 1
        if self._count == self._num_first:
            self._first = self.window(self._num_first)

    @property
    def past(self) -> ComparedSteps:
        """Return the first steps of the round; empty until there are enough later steps to compare with."""
        if self._first is None or self._count < self._num_first + self._num_first // 2:
            return self.window(0)
        return self._first

    def trace(self, aspect: Aspect, rank: int) -> Trace:
        """Return one aspect of one rank in all kept steps."""
        slots, kept = self._newest(self._num_steps), self._kept
        return Trace(kept.steps[slots], kept.excess[slots, aspect, rank], kept.scale[slots, rank])

    def window(self, count: int) -> ComparedSteps:
        """Return the newest steps, at most `count`."""
        return self._kept.at(self._newest(count))

    def _newest(self, count: int) -> NDArray[np.int64]:
        return np.arange(self._count - min(count, len(self)), self._count) % self._num_steps


def _least(seconds: Float64, has_reported: Flags, groups: Int64) -> Float64:
    """Return the least time in each group; 0 if no rank reported.

    It is the time of the rank that arrived last, and so nearly the time of the transfer alone.
    """
    least = np.where(has_reported, seconds, np.inf)[groups].min(axis=-1)
    found: Float64 = np.where(np.isfinite(least), least, 0.0)
    return found
