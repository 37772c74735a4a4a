"""The newest steps of all ranks in memory: seconds by step, operation and rank, as they come in any order and late.

A step is due when every rank has sent something of a later one (so that all its own rows are here), or when the
deadline since its first row has passed; a rank that has sent nothing until then is missing. A rank that sends garbage
moves nothing: rows beyond the ring are left out until half of the ranks have come as far.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.operations import MAX_OPERATIONS, Operation
from megatrain.contracts.step_values import StepValue
from megatrain_diagnostics.analysis.peers import Flags, Floats, Indices
from megatrain_diagnostics.events.tables import StepTotals, Values

WORK_KINDS = (StepValue.SQUARED_LENGTHS, StepValue.LABEL_TOKENS)
"""How much a rank had to do in a step, by what its samples are."""
OVERLAPPED = (Operation.GRADS_REDUCE_SCATTER, Operation.PARAMS_ALL_GATHER)
"""Many of these are under way at once, so that their sum counts the same waiting many times; the longest does not."""
_FIRST_OPERATIONS = 8
LAST_STEP = 2**31 - 1
_MOST_AHEAD = 10_000
"""Steps that a rank may be ahead of those that are judged: rows come in batches, and steps wait for silent ranks."""
_LONGEST_STEP_NS = 7 * 86400 * 10**9


@dataclass(slots=True)
class RingCounters:
    """What was left out."""

    num_late: int = 0
    """Of steps that were already judged, or have left the ring."""
    num_ahead: int = 0
    """Of steps far ahead of the other ranks."""
    num_wrong: int = 0
    """No such rank, operation or duration."""


@dataclass(frozen=True, slots=True, eq=False)
class StepRow:
    """One step of all ranks. Shapes: seconds [operations, ranks], work [kinds, ranks], has_come [ranks]."""

    step: int
    operations: tuple[int, ...]
    """Their numbers."""
    seconds: Floats
    longest: Floats
    """Of OVERLAPPED, the longest span. Shapes: [OVERLAPPED, ranks]."""
    work: Floats
    has_come: Flags

    def of(self, number: int) -> Floats:
        """Return the seconds of an operation, zeros where it was never seen."""
        if number in self.operations:
            found: Floats = self.seconds[self.operations.index(number)]
            return found
        return np.zeros(len(self.has_come))

    def sum_of(self, numbers: tuple[int, ...]) -> Floats:
        chosen = [self.operations.index(number) for number in numbers if number in self.operations]
        if not chosen:
            return np.zeros(len(self.has_come))
        found: Floats = self.seconds[chosen].sum(axis=0)
        return found


class StepRing:
    """Shapes: arrays are [slots, operations, ranks]; a step lies in slot step mod slots."""

    def __init__(self, num_ranks: int, num_steps: int = 64) -> None:
        self.num_ranks = num_ranks
        self.num_steps = num_steps
        self.counters = RingCounters()
        self.next_step: int | None = None
        """The oldest step that is not yet judged; None before the first row."""
        self.newest = np.full(num_ranks, -1, dtype=np.int64)
        """Newest step that each rank has reported, whether it was kept or not; -1: none."""
        self.bytes_of = np.zeros((_FIRST_OPERATIONS, num_ranks))
        """Bytes a step by operation, as the newest rows say."""
        self._index = np.full(MAX_OPERATIONS, -1, dtype=np.int64)
        self._numbers: list[int] = []
        self._seconds: NDArray[np.float32] = np.zeros((num_steps, _FIRST_OPERATIONS, num_ranks), dtype=np.float32)
        self._longest: NDArray[np.float32] = np.zeros((num_steps, len(OVERLAPPED), num_ranks), dtype=np.float32)
        self._work = np.zeros((num_steps, len(WORK_KINDS), num_ranks))
        self._has_come = np.zeros((num_steps, num_ranks), dtype=bool)
        self._first_seen_s = np.full(num_steps, np.inf)

    @property
    def operations(self) -> tuple[int, ...]:
        """Return the numbers of the operations that were seen, in the order of the rows of `StepRow.seconds`."""
        return tuple(self._numbers)

    @property
    def farthest_step(self) -> int:
        """The last step that a rank may tell of now; what is beyond is nonsense of that rank."""
        return LAST_STEP if self.next_step is None else self.next_step + _MOST_AHEAD

    def add_totals(self, totals: StepTotals, now_s: float) -> None:
        """Enter rows. Units: `now_s` is any clock that goes forward, the one that `due` is asked with."""
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
        for place, operation in enumerate(OVERLAPPED):
            of_it = totals.operation[kept] == operation.number
            longest = np.clip(totals.max_ns[kept][of_it], 0, totals.sum_ns[kept][of_it])
            self._longest[slot[of_it], place, rank[of_it]] = longest / 1e9
        self._has_come[slot, rank] = True
        seen = np.unique(slot)
        self._first_seen_s[seen] = np.minimum(self._first_seen_s[seen], now_s)

    def add_values(self, values: Values) -> None:
        """Enter what ranks had to do; other values are none of the ring's business."""
        for row, kind in enumerate(WORK_KINDS):
            chosen = (values.kind == kind) & (values.rank >= 0) & (values.rank < self.num_ranks)
            chosen &= np.isfinite(values.value) & (values.value >= 0)
            step, rank = values.step[chosen].astype(np.int64), values.rank[chosen].astype(np.int64)
            if self.next_step is not None:
                here = (step >= self.next_step) & (step < self.next_step + self.num_steps)
                self._work[step[here] % self.num_steps, row, rank[here]] = values.value[chosen][here]

    def due(self, now_s: float, deadline_s: float) -> int | None:
        """Return the step that is to be judged next, None where it is not yet complete."""
        if self.next_step is None or not np.isfinite(self._first_seen_s).any():
            return None
        if (self.newest > self.next_step).all():
            return self.next_step
        waited_since = self._first_seen_s[self.next_step % self.num_steps]
        if np.isinf(waited_since):
            waited_since = self._first_seen_s.min()  # a step of which nothing came, and later ones did
        return self.next_step if now_s - waited_since >= deadline_s else None

    def take(self, step: int) -> StepRow:
        """Return a step that is due, and make room for another."""
        assert step == self.next_step
        slot = step % self.num_steps
        row = StepRow(
            step=step,
            operations=self.operations,
            seconds=self._seconds[slot, : len(self._numbers)].astype(np.float64),
            longest=self._longest[slot].astype(np.float64),
            work=self._work[slot].copy(),
            has_come=self._has_come[slot].copy(),
        )
        self._clear(slice(slot, slot + 1))
        self.next_step = step + 1
        return row

    def _within(self, step: Indices, rank: Indices, is_right: Flags) -> Indices:
        """Return the rows that belong into the ring, which moves on where most ranks have."""
        if not is_right.any():
            return np.zeros(0, dtype=np.int64)
        if self.next_step is not None:
            # what a rank made up before holds no longer when it says something else
            told_now = np.unique(rank[is_right])
            self.newest[told_now[self.newest[told_now] > self.farthest_step]] = -1
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
        """Go to where most ranks are, if that is outside of the ring: one that says nonsense is not the measure."""
        assert self.next_step is not None
        heard = self.newest[self.newest >= 0]
        typical = int(np.partition(heard, (len(heard) - 1) // 2)[(len(heard) - 1) // 2])
        if typical >= self.next_step + self.num_steps:
            begin = typical - self.num_steps // 2
            self._clear(np.arange(self.next_step, min(begin, self.next_step + self.num_steps)) % self.num_steps)
            self.next_step = begin
        elif typical < self.next_step - self.num_steps:
            self._clear(slice(None))
            self.next_step = typical

    def _clear(self, slots: slice | Indices) -> None:
        self._seconds[slots] = 0.0
        self._longest[slots] = 0.0
        self._work[slots] = 0.0
        self._has_come[slots] = False
        self._first_seen_s[slots] = np.inf

    def _enter_operation(self, number: int) -> None:
        if self._index[number] >= 0:
            return
        if len(self._numbers) == self._seconds.shape[1]:
            self._seconds = np.concatenate([self._seconds, np.zeros_like(self._seconds)], axis=1)
            self.bytes_of = np.concatenate([self.bytes_of, np.zeros_like(self.bytes_of)])
        self._index[number] = len(self._numbers)
        self._numbers.append(number)
