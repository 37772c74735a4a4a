"""Read the monotonic and the wall clock together, to convert times between them."""

from __future__ import annotations

import time

from megatrain.contracts.black_box.values import ClockBase

_NUM_READINGS = 5


def read_clock_base() -> ClockBase:
    """Read both clocks together. It takes the closest of several pairs, in case of a preemption in between."""
    readings: list[ClockBase] = []
    for _ in range(_NUM_READINGS):
        before, unix_ns, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append(ClockBase((before + after) // 2, unix_ns, after - before))
    return min(readings, key=lambda reading: reading.error_ns)
