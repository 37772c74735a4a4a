"""The time of a step: the sum, the longest, the count and the bytes of its spans, by operation.

These totals are the first tier of telemetry: they are streamed for every rank and step; single spans are streamed only
for a few.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from megatrain.contracts.black_box.encoding import NO_VALUE
from megatrain.contracts.black_box.operations import MAX_OPERATIONS, Operation

_STEPS_REMEMBERED = 31
"""The typical step is the median of this many steps: an odd number, and few, so that it follows a change of speed."""


@dataclass(frozen=True, slots=True)
class OperationTotals:
    """All spans of one operation that ended in a step."""

    sum_ns: int
    max_ns: int
    count: int
    num_bytes: int
    attended_ns: int | None = None
    """For how much of `sum_ns` the host only launched and awaited the operation, or on a GPU the compute stream awaited
    it; None if that is not known."""


@dataclass(frozen=True, slots=True)
class StepSummary:
    """A completed step. Spans that ended since the completion of the previous step count for this step."""

    step: int
    started_ns: int
    duration_ns: int
    totals: dict[Operation, OperationTotals] = field(default_factory=dict)

    def sum_ms(self, operation: Operation) -> float:
        """Return the total milliseconds of this operation; 0 if it did not run or is switched off."""
        totals = self.totals.get(operation)
        return totals.sum_ns / 1e6 if totals else 0.0


class TotalsBuilder:
    """Collects (operation number, duration, bytes, attended time or -1) of ended spans from any thread.

    Threads append to `ended` without a lock, which a deque allows. The sums are computed later, outside of the spans.
    """

    def __init__(self) -> None:
        self.ended: deque[tuple[int, int, int, int]] = deque()
        self._sums = _empty_sums()
        self._lock = threading.Lock()

    def fold(self) -> None:
        """Add up the ended spans, so that the queue does not grow without bound between steps.

        Does nothing while a thread already adds them up. That may be this thread itself, interrupted by the garbage
        collector, whose span ends inside the sum.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._fold()
            finally:
                self._lock.release()

    def take(self) -> dict[Operation, OperationTotals]:
        """Return the totals since the last call, largest sum first."""
        with self._lock:
            self._fold()
            sums, self._sums = self._sums, _empty_sums()
        measured = [(operation, sums[operation.number]) for operation in Operation if sums[operation.number][2]]
        measured.sort(key=lambda pair: pair[1][0], reverse=True)
        return {
            operation: OperationTotals(
                values[0], values[1], values[2], values[3], attended_ns=None if values[5] else values[4]
            )
            for operation, values in measured
        }

    def _fold(self) -> None:
        take, sums = self.ended.popleft, self._sums
        for _ in range(len(self.ended)):
            number, duration_ns, num_bytes, attended_ns = take()
            values = sums[number]
            values[0] += duration_ns
            values[2] += 1
            values[3] += num_bytes
            if attended_ns >= 0:
                values[4] += attended_ns
            else:
                values[5] += 1
            if duration_ns > values[1]:
                values[1] = duration_ns


def _empty_sums() -> list[list[int]]:
    """Return [sum, longest, count, bytes, attended, spans without a known attended time] for each operation number."""
    return [[0] * 6 for _ in range(MAX_OPERATIONS)]


class TypicalStep:
    """The median time of the last steps, for a step that computes as much as the present one."""

    def __init__(self) -> None:
        self.median_ns = NO_VALUE
        """NO_VALUE before the second step."""
        self._work = 1
        self._durations: deque[tuple[int, int]] = deque(maxlen=_STEPS_REMEMBERED)
        """(nanoseconds, work) of each step."""

    def set_work(self, work: int) -> None:
        """State how much the present step computes, in any unit that is the same in all steps.

        Times of steps with less work are scaled up to it, so that the first step of a larger batch does not count as
        hung. Times of steps with more work count as they are.
        """
        if work != self._work:
            self._work = work
            self._update()

    def add(self, duration_ns: int) -> None:
        """Count the present step."""
        self._durations.append((duration_ns, self._work))
        self._update()

    def _update(self) -> None:
        if self._durations:
            expected = sorted(max(duration, duration * self._work // work) for duration, work in self._durations)
            self.median_ns = expected[len(expected) // 2]
