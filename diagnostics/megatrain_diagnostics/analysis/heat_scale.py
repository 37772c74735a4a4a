"""The colours of the heat map: the time of ranks in steps as measured, or compared with peers of the same work.

Peers are those of peers.py: the same stage, in a small job on other hosts. Compared with them, a value is a ratio to
their median, or a robust z: how many spreads (1.4826 x median absolute deviation) it is above that median. A spread is
at least a hundredth of the median: else peers that agree to the microsecond would make any rank a straggler. Rows and
columns are pooled by their maximum: a mean would hide one bad rank among many.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from megatrain_diagnostics.analysis.peers import MAD_TO_SIGMA, Peers

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NO_VALUE = 255
"""Code of a cell without a value."""
NUM_LEVELS = 255
"""Codes 0 to 254, from `low` to `high`."""
LARGEST_Z = 1000.0
_SPREAD_FLOOR = 0.01
_TAIL = 0.001
"""Fraction of the cells beyond each end of the colours: one absurd value must not make all others look alike."""
_MIN_ABOVE, _WIDTH_OF_NOISE, _BELOW, _Z_ABOVE = 0.2, 8.0, 0.25, 8.0
"""Colours compared with peers reach from a little below them to values that chance does not produce: the map is for
slow ranks. A value three spreads above its peers is in the middle; the page paints all lower values alike."""


class Scale(StrEnum):
    """What a colour of the heat map stands for: `absolute`, the measured value; `relative`, its ratio to the median of
    the rank's peers; `z`, its distance above that median in robust spreads.
    """

    ABSOLUTE = "absolute"
    RELATIVE = "relative"
    Z = "z"


@dataclass(frozen=True, slots=True, eq=False)
class PeerValues:
    """Median and spread of the peers of each rank. Shapes: [steps, ranks]; NaN where no peer has a value."""

    median: Floats
    spread: Floats


def peer_values(values: Floats, peers: Peers) -> PeerValues:
    """Return median and spread of each rank's peers in each step. Shapes: values [steps, ranks]; NaN: no value."""
    median, spread = np.full_like(values, np.nan), np.zeros_like(values)
    is_known = ~np.isnan(values)
    by_pattern: dict[bytes, list[int]] = {}
    for row in range(len(values)):  # steps with the same ranks are compared together
        by_pattern.setdefault(np.packbits(is_known[row]).tobytes(), []).append(row)
    for rows in by_pattern.values():
        has_value = is_known[rows[0]]
        if not has_value.any():
            continue
        found = peers.reference(values[rows], has_value)
        median[rows], spread[rows] = found.median, found.spread
    return PeerValues(median, spread)


def scaled(values: Floats, against: PeerValues, scale: Scale, least_spread: float) -> Floats:
    """Return the values that colours show. `least_spread`: the least spread, in the unit of the values.

    A value without peers is its own reference: ratio 1, z 0. The result is NaN only where a rank has no value.
    """
    if scale is Scale.ABSOLUTE:
        return values
    median = np.where(np.isnan(against.median), values, against.median)
    if scale is Scale.Z:
        noise = np.maximum(np.maximum(against.spread, _SPREAD_FLOOR * np.abs(median)), least_spread)
        return np.clip((values - median) / noise, -LARGEST_Z, LARGEST_Z)
    ratio = values / np.maximum(median, least_spread)
    return np.where((median == 0.0) & (values == 0.0), 1.0, ratio)


def pooled(values: Floats, size: int, axis: int) -> Floats:
    """Return the greatest of each `size` neighbours along an axis; NaN where all of them are NaN."""
    if size == 1:
        return values
    moved = np.where(np.isnan(values), -np.inf, values)
    greatest = np.maximum.reduceat(moved, np.arange(0, values.shape[axis], size), axis=axis)
    return np.where(np.isneginf(greatest), np.nan, greatest)


def pooled_by(values: Floats, groups: Ints, num_groups: int) -> Floats:
    """Return the greatest value of the ranks of each group. Shapes: values [steps, ranks]; result [steps, groups]."""
    greatest = np.full((values.shape[0], num_groups), -np.inf)
    order = np.argsort(groups, kind="stable")
    present, first = np.unique(groups[order], return_index=True)
    if len(present):
        moved = np.where(np.isnan(values), -np.inf, values)
        greatest[:, present] = np.maximum.reduceat(moved[:, order], first, axis=1)
    return np.where(np.isneginf(greatest), np.nan, greatest)


@dataclass(frozen=True, slots=True)
class HeatRange:
    """The ends of the colours, and of the values: some values lie beyond the colours."""

    low: float
    high: float
    least: float
    greatest: float


def colour_range(values: Floats, scale: Scale) -> HeatRange:
    """Return where colours begin and end, never so close together that noise stands out."""
    found = values[~np.isnan(values)]
    if not len(found):
        return HeatRange(0.0, 1.0, 0.0, 0.0)
    if scale is Scale.RELATIVE:
        # as wide as the noise of nearly all cells requires: a slow rank is bright, whatever its neighbours do
        noise = MAD_TO_SIGMA * float(np.median(np.abs(found - 1.0)))
        above = max(_MIN_ABOVE, _WIDTH_OF_NOISE * noise)
        low, high = 1.0 - _BELOW * above, 1.0 + above
    elif scale is Scale.Z:
        low, high = -_BELOW * _Z_ABOVE, _Z_ABOVE
    else:
        low, high = _tails(found)
        high = high if high > low else low + max(abs(low) * _SPREAD_FLOOR, 1e-9)
    return HeatRange(low, high, float(found.min()), float(found.max()))


def codes(values: Floats, low: float, high: float) -> NDArray[np.uint8]:
    """Return each value's level between the ends; values beyond get the end's level, NaN gets NO_VALUE."""
    is_known = ~np.isnan(values)
    level = np.clip((np.where(is_known, values, low) - low) * ((NUM_LEVELS - 1) / (high - low)), 0, NUM_LEVELS - 1)
    return np.where(is_known, np.rint(level), NO_VALUE).astype(np.uint8)


def _tails(found: Floats) -> tuple[float, float]:
    """Return two values: a fraction _TAIL of the values lies below the first, and above the second."""
    last = len(found) - 1
    places = (min(last, int(_TAIL * len(found))), max(0, last - int(_TAIL * len(found))))
    parted = np.partition(found, places)
    return float(parted[places[0]]), float(parted[places[1]])
