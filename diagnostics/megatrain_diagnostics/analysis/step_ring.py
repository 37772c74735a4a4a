"""Keeps the newest steps of all ranks in memory: seconds by step, operation and rank. Rows may be late and unordered.

A step is due when all ranks have sent rows of a later step (so that their rows of this step are complete), or when a
deadline after its first row has passed; ranks that have sent nothing until then are missing. A rank that sends wrong
step numbers does not move the ring: rows beyond the ring are dropped until half of the ranks have reached them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.black_box.operations import MAX_OPERATIONS, REPLICA_COLLECTIVES, Operation, StepValue
from megatrain_diagnostics.events.tables import Flags, Float64, Int64, StepTotals, Values

WORK_KINDS = (StepValue.SQUARED_LENGTHS, StepValue.LABEL_TOKENS)
"""Values that measure how much work the samples of a rank are in a step."""
_FIRST_OPERATIONS = 8
LAST_STEP = 2**31 - 1
_MAX_AHEAD = 10_000
"""Number of steps that a rank may be ahead of the compared ones: rows arrive in batches, and steps wait for silent
ranks."""
_LONGEST_STEP_NS = 7 * 86400 * 10**9


@dataclass(slots=True)
class RingCounters:
    """Numbers of rows that were dropped."""

    num_late: int = 0
    """Rows of steps that were already compared, or have left the ring."""
    num_ahead: int = 0
    """Rows of steps far ahead of the other ranks."""
    num_wrong: int = 0
    """Rows with an impossible rank, step, operation or duration."""


@dataclass(frozen=True, slots=True, eq=False)
class StepRow:
    """One step of all ranks.

    Shapes: seconds [operations, ranks], work [kinds, ranks], num_forwards and has_reported [ranks].
    """

    step: int
    operations: tuple[int, ...]
    """Numbers of the operations."""
    seconds: Float64
    longest: Float64
    """Longest span of each of REPLICA_COLLECTIVES. Many of these run at the same time, so their sum counts the same
    wait repeatedly. Shapes: [REPLICA_COLLECTIVES, ranks]."""
    work: Float64
    num_forwards: Int64
    """The number of forward passes: micro-batches times chunks, 0 if it is not known."""
    has_reported: Flags

    def of(self, *wanted: Operation) -> Float64:
        """Return the seconds of operations, summed; zeros if there are no rows of them. Shape: [ranks]."""
        found: Float64 = self.seconds[rows_of(wanted, self.operations)].sum(axis=0)
        return found


def rows_of(wanted: Iterable[Operation], numbers: Sequence[int]) -> list[int]:
    """Return the indices of operations in a list of operation numbers; those that are not in it are left out."""
    return [numbers.index(operation.number) for operation in wanted if operation.number in numbers]


class StepRing:
    """A ring buffer of steps. Arrays have the shape [slots, operations, ranks]; step s is in slot s mod slots."""

    def __init__(self, num_ranks: int, num_steps: int = 64) -> None:
        self.num_ranks = num_ranks
        self.num_steps = num_steps
        self.counters = RingCounters()
        self.next_step: int | None = None
        """The oldest step that is not yet compared; None before the first row."""
        self.newest = np.full(num_ranks, -1, dtype=np.int64)
        """Newest step that each rank has reported, even if its row was dropped; -1: none."""
        self.bytes_of = np.zeros((_FIRST_OPERATIONS, num_ranks))
        """Bytes per step by operation, from the newest rows."""
        self._index = np.full(MAX_OPERATIONS, -1, dtype=np.int64)
        self._numbers: list[int] = []
        self._seconds: NDArray[np.float32] = np.zeros((num_steps, _FIRST_OPERATIONS, num_ranks), dtype=np.float32)
        self._longest: NDArray[np.float32] = np.zeros(
            (num_steps, len(REPLICA_COLLECTIVES), num_ranks), dtype=np.float32
        )
        self._work = np.zeros((num_steps, len(WORK_KINDS), num_ranks))
        self._num_forwards = np.zeros((num_steps, num_ranks), dtype=np.int64)
        self._has_reported = np.zeros((num_steps, num_ranks), dtype=bool)
        self._first_seen_s = np.full(num_steps, np.inf)

    @property
    def operations(self) -> tuple[int, ...]:
        """Return the numbers of the operations that were seen, in the order of the rows of `StepRow.seconds`."""
        return tuple(self._numbers)

    @property
    def farthest_step(self) -> int:
        """The last step that a rank can have reached; a rank that reports a later step is wrong."""
        return LAST_STEP if self.next_step is None else self.next_step + _MAX_AHEAD

    def add_totals(self, totals: StepTotals, now_s: float) -> None:
        """Add rows. Units: `now_s` is the time of a monotonic clock, the same as in `due`."""
        step, rank = totals.step.astype(np.int64), totals.rank.astype(np.int64)
        is_right = (rank >= 0) & (rank < self.num_ranks) & (totals.operation < MAX_OPERATIONS) & (step >= 0)
        is_right &= (totals.sum_ns >= 0) & (totals.sum_ns < _LONGEST_STEP_NS)
        self.counters.num_wrong += int(len(is_right) - is_right.sum())
        kept = self._within(step, rank, is_right)
        if not len(kept):
            return
        for number in np.unique(totals.operation[kept]).tolist():
            self._enter_operation(number)
        step, rank = step[kept], rank[kept]
        slot, row = step % self.num_steps, self._index[totals.operation[kept]]
        self._seconds[slot, row, rank] = totals.sum_ns[kept] / 1e9
        self.bytes_of[row, rank] = np.maximum(totals.num_bytes[kept], 0)
        for place, operation in enumerate(REPLICA_COLLECTIVES):
            of_it = totals.operation[kept] == operation.number
            longest = np.clip(totals.max_ns[kept][of_it], 0, totals.sum_ns[kept][of_it])
            self._longest[slot[of_it], place, rank[of_it]] = longest / 1e9
        is_forward = totals.operation[kept] == Operation.FORWARD_COMPUTE.number
        self._num_forwards[slot[is_forward], rank[is_forward]] = np.maximum(totals.count[kept][is_forward], 0)
        self._has_reported[slot, rank] = True
        seen = np.unique(slot)
        self._first_seen_s[seen] = np.minimum(self._first_seen_s[seen], now_s)

    def add_values(self, values: Values) -> None:
        """Add the work of ranks; other values are ignored."""
        for row, kind in enumerate(WORK_KINDS):
            chosen = (values.kind == kind) & (values.rank >= 0) & (values.rank < self.num_ranks)
            chosen &= np.isfinite(values.value) & (values.value >= 0)
            step, rank = values.step[chosen].astype(np.int64), values.rank[chosen].astype(np.int64)
            if self.next_step is not None:
                here = (step >= self.next_step) & (step < self.next_step + self.num_steps)
                self._work[step[here] % self.num_steps, row, rank[here]] = values.value[chosen][here]

    def due(self, now_s: float, deadline_s: float) -> int | None:
        """Return the next step to compare; None if it is not due."""
        if self.next_step is None or not np.isfinite(self._first_seen_s).any():
            return None
        if (self.newest > self.next_step).all():
            return self.next_step
        waited_since = self._first_seen_s[self.next_step % self.num_steps]
        if np.isinf(waited_since):
            waited_since = self._first_seen_s.min()  # there are no rows of this step, but of later steps
        return self.next_step if now_s - waited_since >= deadline_s else None

    def take(self, step: int) -> StepRow:
        """Return a step that is due, and free its slot."""
        assert step == self.next_step
        slot = step % self.num_steps
        row = StepRow(
            step=step,
            operations=self.operations,
            seconds=self._seconds[slot, : len(self._numbers)].astype(np.float64),
            longest=self._longest[slot].astype(np.float64),
            work=self._work[slot].copy(),
            num_forwards=self._num_forwards[slot].copy(),
            has_reported=self._has_reported[slot].copy(),
        )
        self._clear(slice(slot, slot + 1))
        self.next_step = step + 1
        return row

    def _within(self, step: Int64, rank: Int64, is_right: Flags) -> Int64:
        """Move the ring to the steps of most ranks, and return the rows that are within it."""
        if not is_right.any():
            return np.zeros(0, dtype=np.int64)
        if self.next_step is not None:
            # an impossible step of a rank is dropped when the rank reports again
            reporting_now = np.unique(rank[is_right])
            self.newest[reporting_now[self.newest[reporting_now] > self.farthest_step]] = -1
        np.maximum.at(self.newest, rank[is_right], step[is_right])
        if self.next_step is None:
            typical = np.median(step[is_right])
            self.next_step = int(np.min(step[is_right & (step >= typical - self.num_steps)]))
        self._follow()
        is_ahead = is_right & (step >= self.next_step + self.num_steps)
        is_late = is_right & (step < self.next_step)
        self.counters.num_ahead += int(is_ahead.sum())
        self.counters.num_late += int(is_late.sum())
        return np.flatnonzero(is_right & ~is_ahead & ~is_late)

    def _follow(self) -> None:
        """Move the ring if the median step of the ranks is outside it; wrong steps of one rank do not move it."""
        assert self.next_step is not None
        steps_of_ranks = self.newest[self.newest >= 0]
        typical = int(np.partition(steps_of_ranks, (len(steps_of_ranks) - 1) // 2)[(len(steps_of_ranks) - 1) // 2])
        if typical >= self.next_step + self.num_steps:
            begin = typical - self.num_steps // 2
            self._clear(np.arange(self.next_step, min(begin, self.next_step + self.num_steps)) % self.num_steps)
            self.next_step = begin
        elif typical < self.next_step - self.num_steps:
            self._clear(slice(None))
            self.next_step = typical

    def _clear(self, slots: slice | Int64) -> None:
        self._seconds[slots] = 0.0
        self._longest[slots] = 0.0
        self._work[slots] = 0.0
        self._num_forwards[slots] = 0
        self._has_reported[slots] = False
        self._first_seen_s[slots] = np.inf

    def _enter_operation(self, number: int) -> None:
        if self._index[number] >= 0:
            return
        if len(self._numbers) == self._seconds.shape[1]:
            self._seconds = np.concatenate([self._seconds, np.zeros_like(self._seconds)], axis=1)
            self.bytes_of = np.concatenate([self.bytes_of, np.zeros_like(self.bytes_of)])
        self._index[number] = len(self._numbers)
        self._numbers.append(number)
