"""Tests whether a series rises or falls beyond noise, and whether the pace depends on the hour of the day.

A trend is a Theil-Sen slope with the Mann-Kendall test. A dependence on the hour has causes outside the job: other jobs
on the network, cooling, nightly jobs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatrain_diagnostics.events.tables import Float64, Int64

_MAX_POINTS = 400
"""Longer series are reduced to medians of neighbors, because every pair of points is compared."""
_MIN_POINTS = 8
_CERTAIN = 3.0
"""Standard deviations of the Mann-Kendall statistic: one in 370 series without a trend exceeds it by chance."""
_MIN_CHANGE = 0.05
_MIN_SPAN_NS = 20 * 3600 * 10**9
_MIN_STEPS = 20
_NOTABLE = 0.05
_NS_AN_HOUR = 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through a series. Units: as the series. `first`, `last`: values of the line at both ends."""

    num_points: int
    first: float
    last: float
    per_1000: float
    """Change per 1000 units of `places`, such as steps."""
    certainty: float
    """The Mann-Kendall statistic in standard deviations, negative for a falling series."""

    @property
    def is_rising(self) -> bool:
        return self.certainty > _CERTAIN and self.last - self.first > _MIN_CHANGE * abs(self.first)

    @property
    def is_falling(self) -> bool:
        return self.certainty < -_CERTAIN and self.first - self.last > _MIN_CHANGE * abs(self.first)


def trend(places: Float64, values: Float64) -> Trend | None:
    """Return the trend of finite values over `places`, which ascend, such as step numbers.

    None for fewer than 8 values, or if all places are equal.
    """
    if len(values) < _MIN_POINTS:
        return None
    if len(values) > _MAX_POINTS:
        parts = np.array_split(np.arange(len(values)), _MAX_POINTS)
        places = np.array([np.median(places[part]) for part in parts])
        values = np.array([np.median(values[part]) for part in parts])
    earlier, later = np.triu_indices(len(values), k=1)
    apart = places[later] - places[earlier]
    differences = (values[later] - values[earlier])[apart > 0]
    if not len(differences):
        return None
    slope = float(np.median(differences / apart[apart > 0]))
    middle = float(np.median(values - slope * places))
    num = len(values)
    score = float(np.sign(differences).sum())
    deviation = math.sqrt(num * (num - 1) * (2 * num + 5) / 18.0)
    return Trend(
        num_points=num,
        first=middle + slope * float(places[0]),
        last=middle + slope * float(places[-1]),
        per_1000=1000.0 * slope,
        certainty=score / deviation,
    )


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
    """Return the step time by hour; None if the steps cover less than 20 hours, or there are too few."""
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
