"""A point in time by which something must be done, in any number of steps."""

from __future__ import annotations

import time


class Deadline:
    """Counts down from its creation, on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """The remaining seconds; below 0 when it has passed."""
        return self._end - time.monotonic()

    def remaining_s(self) -> float:
        """Return the remaining seconds, more than 0. Raises: TimeoutError when none are left."""
        left_s = self.left_s
        if left_s <= 0:
            raise TimeoutError(f"no answer within {self.seconds:.1f} s")
        return left_s

    def part(self, seconds: float) -> Deadline:
        """Return a deadline `seconds` from now, or this one's end if that is sooner."""
        return Deadline(min(seconds, max(self.left_s, 0.0)))
