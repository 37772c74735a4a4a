"""Measures the offset of one clock from another by questions and answers, with NTP's formula (RFC 5905 sec. 8).

Of several answers the one with the shortest round trip is used, because it waited least in queues. Whichever direction
was slower, the error of the offset is at most half of the round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatrain_diagnostics.wire.messages import ClockAnswer


@dataclass(frozen=True, slots=True)
class ClockReading:
    """One question: the times of asking and of receiving the answer, by this host's clock, and the answer."""

    asked_ns: int
    answer: ClockAnswer
    answered_ns: int

    @property
    def round_trip_ns(self) -> int:
        """Return the round-trip time without the other side's processing; 0 if clocks were set in between."""
        own, others = self.answered_ns - self.asked_ns, self.answer.sent_unix_ns - self.answer.received_unix_ns
        return max(0, own - max(0, others))

    @property
    def offset_ns(self) -> int:
        """Return this host's clock minus the other clock."""
        there = self.answer.received_unix_ns + self.answer.sent_unix_ns
        return (self.asked_ns + self.answered_ns - there) // 2

    @property
    def error_ns(self) -> int:
        """Return the error bound of the offset, in either direction."""
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
    """Return the reading with the shortest round trip, of those during which this clock was not set back, if any."""
    whole = [reading for reading in readings if reading.answered_ns >= reading.asked_ns] or list(readings)
    return min(whole, key=lambda reading: reading.round_trip_ns)
