"""What producers of pictures did for the reads of a batch: plain numbers, which the rank records with its telemetry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProducerWork:
    """What one producer did for one read. All 0: it was not asked.

    start_ns, duration_ns: from its first request to the end of its last one, by time.monotonic_ns. num_bytes: of
    patches and captions. num_failed: requests without a usable answer; they were sent again, to any producer.
    answering_ns: the sum of the times of the answered requests. num_waiting: the largest number of requests, from any
    process, that waited at the producer when one of these requests arrived.
    """

    start_ns: int = 0
    duration_ns: int = 0
    num_pictures: int = 0
    num_bytes: int = 0
    num_answered: int = 0
    num_failed: int = 0
    answering_ns: int = 0
    num_waiting: int = 0

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns

    @property
    def was_asked(self) -> bool:
        return self.num_answered + self.num_failed > 0

    @property
    def answer_s(self) -> float:
        """The mean time of an answered request in seconds; 0 without one."""
        return self.answering_ns / self.num_answered / 1e9 if self.num_answered else 0.0

    def joined(self, other: ProducerWork) -> ProducerWork:
        """Return what the producer did in both."""
        if not (self.was_asked and other.was_asked):
            return self if self.was_asked else other
        start_ns = min(self.start_ns, other.start_ns)
        return ProducerWork(
            start_ns,
            max(self.end_ns, other.end_ns) - start_ns,
            self.num_pictures + other.num_pictures,
            self.num_bytes + other.num_bytes,
            self.num_answered + other.num_answered,
            self.num_failed + other.num_failed,
            self.answering_ns + other.answering_ns,
            max(self.num_waiting, other.num_waiting),
        )


ProducerWorks = tuple[ProducerWork, ...]
"""One for each producer, in the order of their addresses; empty if samples have no pictures of producers."""


def waited_ns(works: Sequence[ProducerWork]) -> tuple[int, int]:
    """Return start and duration of the time in which a read waited for its pictures; (0, 0) if it asked no producer."""
    asked = [work for work in works if work.was_asked]
    if not asked:
        return 0, 0
    start_ns = min(work.start_ns for work in asked)
    return start_ns, max(work.end_ns for work in asked) - start_ns


def summed(reads: Iterable[ProducerWorks]) -> ProducerWorks:
    """Return what each producer did in all reads."""
    found: ProducerWorks = ()
    for works in reads:
        found = tuple(before.joined(work) for before, work in zip(found, works, strict=True)) if found else works
    return found
