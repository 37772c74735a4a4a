"""The one clock base of a host: all its events' times on the wall clock, counted from one pair of readings.

If the system's clock is set in the meantime, the events' times continue evenly. Their offset from the daemon's clock is
measured by the same clock base, so that aligning them still works.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from megatrain.contracts.black_box.values import ClockBase


@dataclass(frozen=True, slots=True)
class HostClock:
    """Converts monotonic to unix ns."""

    base: ClockBase

    @property
    def offset_ns(self) -> int:
        """Return what to add to a monotonic time."""
        return self.base.unix_ns - self.base.monotonic_ns

    def now_ns(self) -> int:
        """Return the time by this clock, unix ns."""
        return self.offset_ns + time.monotonic_ns()
