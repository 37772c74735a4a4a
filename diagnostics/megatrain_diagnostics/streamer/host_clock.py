"""The one clock base of a host: all its events' times on the wall clock, counted from one pair of readings.

Should somebody set the system's clock meanwhile, the events' times go on evenly; how far they are from the daemon's is
measured by the same clock, so that aligning them still works.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from megatrain.contracts.black_box_values import ClockBase


@dataclass(frozen=True, slots=True)
class HostClock:
    """Turns monotonic into unix ns."""

    base: ClockBase

    @property
    def offset_ns(self) -> int:
        """Return what is to be added to a monotonic time."""
        return self.base.unix_ns - self.base.monotonic_ns

    def now_ns(self) -> int:
        """Return the time by this clock, unix ns."""
        return self.offset_ns + time.monotonic_ns()
