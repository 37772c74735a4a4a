"""Finds changes of level in a noisy series: Bayesian online change-point detection, and a check of the shift's size.

Detection follows Adams and MacKay (2007), for Gaussian data of unknown mean and variance: it computes a posterior over
how many points ago the level began. Alone it gives many false alarms, so a change must have a posterior above 0.9 AND
shift the level by 10 % (Greyhound, ATC'25) and by more than four standard errors. Single outliers are clipped first,
because one slow step is not a change of level. The shift is relative to the last reported level, so that a decline in
small steps is found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from megatrain_diagnostics.events.tables import Float64

POSTERIOR = 0.9
SHIFT = 0.1
MIN_POINTS = 6
"""Least number of points of a level, and so the least delay with which a change is reported."""
_HAZARD = 1.0 / 250.0
"""One change is expected in 250 points; the result hardly depends on this number."""
_LOG_HAZARD = math.log(_HAZARD)
_LOG_NO_HAZARD = math.log1p(-_HAZARD)
_MAX_RUN_LENGTHS = 60
"""Once there are more than twice this number of possible ages of the current level, this many are kept: the likeliest.
The age of the whole series is always kept too."""
_OUTLIER_SPREADS = 3.0
_CERTAIN = 4.0
"""Number of standard errors of a level that a shift must exceed."""
_NEIGHBORS = 4
"""Number of points on each side in the median filter: up to this many slow steps in a row are not a new level."""
_NUM_NOISE_STEPS = 40
"""Number of points at the start of a level from which its noise is estimated."""
_MIN_SPREAD = 0.005
"""Least noise, as a fraction of the level."""
_MEMORY = 200
"""Number of points of a level that are used for its mean or median."""


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """A change of level. `place` is the index of the first point of the new level."""

    place: int
    posterior: float
    before: float
    """Mean of the previous reported level, after outliers are clipped."""
    after: float
    """Median of the level that begins here."""
    seen_at: int
    """Index of the point at which the change was detected."""

    @property
    def shift(self) -> float:
        """Return the change relative to the level before: 0.1 is 10 % more."""
        return self.after / self.before - 1.0


def change_points(values: Float64) -> tuple[ChangePoint, ...]:
    """Return the changes of level of a positive series, oldest first.

    Raises: ValueError for values that are not finite and positive.
    """
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError("change points need finite, positive values")
    calm = _without_outliers(values)
    seen: list[tuple[int, float, int]] = []
    begin = 0
    while len(calm) - begin >= 2 * MIN_POINTS:
        change = _first_change(calm[begin:])
        if change is None:
            break
        seen.append((begin + change[0], change[1], begin + change[2]))
        begin = seen[-1][0]
    bounds = [0, *(place for place, _, _ in seen), len(calm)]
    levels = [_level(calm[first:last]) for first, last in pairwise(bounds)] if len(calm) else []
    found: list[ChangePoint] = []
    last_level = levels[0] if levels else 0.0
    noise = _noise(calm) if len(calm) else 0.0
    for (place, probability, at), level, last in zip(seen, levels[1:], bounds[2:], strict=True):
        error = noise / math.sqrt(min(last - place, _MEMORY))
        if abs(level / last_level - 1.0) >= SHIFT and abs(level - last_level) > _CERTAIN * error:
            found.append(ChangePoint(place, probability, last_level, level, at))
            last_level = level
    return _measured(calm, found)


def _measured(calm: Float64, found: list[ChangePoint]) -> tuple[ChangePoint, ...]:
    """Set `after` to the median up to the next change; drop changes whose shift is then too small."""
    ends = [*(point.place for point in found), len(calm)][1:]
    measured = [
        replace(point, after=float(np.median(calm[point.place : end][:_MEMORY])))
        for point, end in zip(found, ends, strict=True)
    ]
    return tuple(point for point in measured if abs(point.shift) >= SHIFT)


def _first_change(values: Float64) -> tuple[int, float, int] | None:
    """Return (index of the new level's first point, posterior, index of detection); None without a change."""
    scale = _level(values[: 2 * MIN_POINTS])
    run = _RunLengths(_noise(values[:_NUM_NOISE_STEPS]) / scale)
    for index, value in enumerate((values / scale).tolist()):
        run.add(value)
        age = run.likeliest_age()
        place = index + 1 - age
        if age < MIN_POINTS or place < MIN_POINTS:
            continue
        # the exact start of a level is uncertain, so the probabilities of neighboring places are summed
        probability = run.probability_up_to(age + MIN_POINTS - 1)
        if probability > POSTERIOR:
            return place, probability, index
    return None


class _RunLengths:
    """The posterior over the age of the current level, with a normal-inverse-gamma distribution for each age."""

    def __init__(self, spread: float) -> None:
        self._prior = (1.0, 0.1, 2.0, 2.0 * spread * spread)  # mean, its weight, shape and scale of the variance
        self._log_weights = np.zeros(1)
        self._ages = np.zeros(1, dtype=np.int64)
        self._mean, self._weight, self._shape, self._scale = (np.array([value]) for value in self._prior)

    def add(self, value: float) -> None:
        """Add the next point."""
        degrees = 2.0 * self._shape
        variance = self._scale * (self._weight + 1.0) / (self._shape * self._weight)
        distance = (value - self._mean) ** 2 / (variance * degrees)
        log_predicted = _log_gamma_ratio(self._shape) - 0.5 * np.log(np.pi * degrees * variance)
        log_predicted = log_predicted - (self._shape + 0.5) * np.log1p(distance)
        joint = self._log_weights + log_predicted
        joint -= _log_sum(joint)
        weights = np.concatenate(([_LOG_HAZARD], joint + _LOG_NO_HAZARD))
        distance_weight = 0.5 * self._weight / (self._weight + 1.0)
        mean = (self._weight * self._mean + value) / (self._weight + 1.0)
        scale = self._scale + distance_weight * (value - self._mean) ** 2
        priors = self._prior
        self._mean = np.concatenate(([priors[0]], mean))
        self._weight = np.concatenate(([priors[1]], self._weight + 1.0))
        self._shape = np.concatenate(([priors[2]], self._shape + 0.5))
        self._scale = np.concatenate(([priors[3]], scale))
        self._ages = np.concatenate(([0], self._ages + 1))
        self._log_weights = weights
        if len(weights) > 2 * _MAX_RUN_LENGTHS:
            self._forget()

    def _forget(self) -> None:
        """Drop the least likely ages, but keep the age of the whole series, which means that no change occurred."""
        keep = np.sort(np.argsort(self._log_weights[:-1])[-_MAX_RUN_LENGTHS:])
        keep = np.append(keep, len(self._log_weights) - 1)
        for name in ("_log_weights", "_ages", "_mean", "_weight", "_shape", "_scale"):
            setattr(self, name, getattr(self, name)[keep])
        self._log_weights -= _log_sum(self._log_weights)

    def likeliest_age(self) -> int:
        """Return the most likely number of points of the current level."""
        return int(self._ages[int(np.argmax(self._log_weights))])

    def probability_up_to(self, age: int) -> float:
        """Return the probability that the current level has at most this many points."""
        return float(np.exp(self._log_weights[self._ages <= age]).sum())


def _log_sum(logs: Float64) -> float:
    """Return the logarithm of the sum of exponentials."""
    most = float(logs.max())
    return most + math.log(float(np.exp(logs - most).sum()))


def _log_gamma_ratio(shape: Float64) -> Float64:
    """Return log(gamma(shape + 1/2) / gamma(shape)) by a series for large arguments: numpy has no log-gamma."""
    inverse = 1.0 / shape
    # the error is below 1e-5 for arguments of at least 2, the smallest shape
    ratio: Float64 = 0.5 * np.log(shape) - inverse / 8.0 + inverse**3 / 192.0 - inverse**5 / 640.0
    return ratio


def _without_outliers(values: Float64) -> Float64:
    """Return the values, clipped to a range around the median of their neighbors on both sides.

    A median filter preserves edges, so the place of a change of level does not move.
    """
    if len(values) < 2 * _NEIGHBORS + 1:
        return values
    padded = np.pad(values, _NEIGHBORS, mode="reflect")
    middle = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * _NEIGHBORS + 1), axis=1)
    limit = _OUTLIER_SPREADS * max(_noise(values), _MIN_SPREAD * float(np.median(values)))
    calm: Float64 = np.clip(values, middle - limit, middle + limit)
    return calm


def _level(values: Float64) -> float:
    """Return the mean of a level's newest points."""
    return float(values[-_MEMORY:].mean())


def _noise(values: Float64) -> float:
    """Return the standard deviation of the noise, from differences of neighbors, which a few changes hardly affect."""
    differences = np.abs(np.diff(values))
    # the median of |a - b| of two normal values is 0.954 standard deviations
    noise = float(np.median(differences)) / 0.954 if len(differences) else 0.0
    return max(noise, _MIN_SPREAD * float(np.median(values)))
