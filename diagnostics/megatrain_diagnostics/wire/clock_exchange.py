"""How far one clock is ahead of another, by questions and answers: NTP's formula; the quickest of several counts.

RFC 5905 sec. 8. The quickest question loses the least time in queues. Whichever direction was slower, the true offset
is within half of the round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatrain_diagnostics.wire.messages import ClockAnswer


@dataclass(frozen=True, slots=True)
class ClockReading:
    """One question: its time and the answer's arrival by the asker's clock, and the answer."""

    asked_ns: int
    answer: ClockAnswer
    answered_ns: int

    @property
    def round_trip_ns(self) -> int:
        """Return the round-trip time without the other side's processing. Never negative, whatever the clocks do."""
        own, others = self.answered_ns - self.asked_ns, self.answer.sent_unix_ns - self.answer.received_unix_ns
        return max(0, own - max(0, others))

    @property
    def offset_ns(self) -> int:
        """Return own clock minus the other's."""
        there = self.answer.received_unix_ns + self.answer.sent_unix_ns
        return (self.asked_ns + self.answered_ns - there) // 2

    @property
    def error_ns(self) -> int:
        """Return by how much the offset may be wrong, in either direction."""
        return self.round_trip_ns // 2 + 1


def read_clock(ask: Callable[[], ClockAnswer], clock_ns: Callable[[], int], num_questions: int) -> ClockReading:
    """Ask several times and return the quickest reading."""
    readings = []
    for _ in range(num_questions):
        asked_ns = clock_ns()
        answer = ask()
        readings.append(ClockReading(asked_ns, answer, clock_ns()))
    return quickest(readings)


def quickest(readings: Sequence[ClockReading]) -> ClockReading:
    """Return the reading with the shortest round trip, without those during which a clock was set back."""
    whole = [one for one in readings if one.answered_ns >= one.asked_ns] or list(readings)
    return min(whole, key=lambda one: one.round_trip_ns)
