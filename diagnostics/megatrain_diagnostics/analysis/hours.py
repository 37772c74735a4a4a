"""Whether the pace depends on the hour of the day: neighbours on the network, cooling, nightly jobs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain_diagnostics.events.tables import Float64, Int64

_MIN_SPAN_NS = 20 * 3600 * 10**9
_MIN_STEPS = 20
_NOTABLE = 0.05
_NS_AN_HOUR = 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Hours:
    """Median step time by the hour of the day, UTC. Units: s."""

    median_s: dict[int, float]
    slowest: int
    excess: float
    """Excess of the slowest hour over the median of the hours."""

    @property
    def is_notable(self) -> bool:
        return self.excess >= _NOTABLE


def hours_of_day(at_ns: Int64, seconds: Float64) -> Hours | None:
    """Return the pace by the hour; None where the steps cover less than 20 hours, or are too few."""
    if not len(at_ns) or int(at_ns.max()) - int(at_ns.min()) < _MIN_SPAN_NS:
        return None
    hour = at_ns // _NS_AN_HOUR % 24
    medians = {
        number: float(np.median(seconds[hour == number]))
        for number in np.unique(hour).tolist()
        if int((hour == number).sum()) >= _MIN_STEPS
    }
    if not medians:
        return None
    slowest = max(medians, key=lambda number: medians[number])
    return Hours(medians, slowest, medians[slowest] / float(np.median(list(medians.values()))) - 1.0)
