"""A clock that only a test moves."""

from __future__ import annotations

from tests.helpers.waiting import wait_until


class SetClock:
    """Takes the place of the module `time` where a test patches it, and counts how often it was read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_reads = 0

    def monotonic(self) -> float:
        self.num_reads += 1
        return self.now

    def wait_for_reads(self, count: int) -> None:
        """Wait in real time until it was read `count` more times."""
        enough = self.num_reads + count
        wait_until(lambda: self.num_reads >= enough, f"{count} more reads of the clock")
