"""Computes the colors of the heat map from times of ranks in steps, as measured or relative to peers.

Peers are those of peers.py: ranks of the same stage; in a small job, those on other hosts. Relative to them, a value is
its ratio to their median, or a robust z: by how many spreads (1.4826 x median absolute deviation) it exceeds that
median. A spread is at least a hundredth of the median, so that tiny differences from nearly equal peers do not stand
out. Rows and columns are pooled by their maximum, because a mean would hide one bad rank among many.
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
"""With scale `absolute`, the fraction of the cells beyond each end of the color range, so that one extreme value does
not make all others look alike."""
_MIN_ABOVE = 0.2
"""With scale `relative`, the color range reaches at least this far above 1, which is a value equal to the peers."""
_WIDTH_OF_NOISE = 8.0
"""With scale `relative`, the range reaches this many standard deviations of typical cells above 1: to values that are
not due to chance, because the map shows slow ranks."""
_Z_ABOVE = 8.0
"""With scale `z`, the range ends this many spreads above the peers."""
_BELOW = 0.25
"""The reach of the range below the peers, as a fraction of its reach above them. So with scale `z` the middle of the
range is three spreads above the peers. The page paints all lower values with the same color."""


class Scale(StrEnum):
    """The meaning of a color of the heat map: `absolute`, the measured value; `relative`, its ratio to the median of
    the rank's peers; `z`, its distance above that median in robust spreads.
    """

    ABSOLUTE = "absolute"
    RELATIVE = "relative"
    Z = "z"


@dataclass(frozen=True, slots=True, eq=False)
class PeerValues:
    """Median and spread of the peers of each rank. Shapes: [steps, ranks]; NaN if no peer has a value."""

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
    """Return the values that colors stand for. `least_spread`: lower limit of the spread, in the unit of the values.

    A value without peers is its own reference: ratio 1, z 0. The result is NaN only if a rank has no value.
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
    """Return the maximum of each `size` neighbors along an axis; NaN if all of them are NaN."""
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
    """The range of the colors, `low` to `high`, and of the values, `least` to `greatest`, which may be wider."""

    low: float
    high: float
    least: float
    greatest: float


def color_range(values: Floats, scale: Scale) -> HeatRange:
    """Return the range of the colors, at least so wide that noise does not stand out."""
    found = values[~np.isnan(values)]
    if not len(found):
        return HeatRange(0.0, 1.0, 0.0, 0.0)
    if scale is Scale.RELATIVE:
        # depends only on the noise of typical cells, so that other slow ranks do not make a slow rank less bright
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
    """Return the level of each value from `low` to `high`, clipped to this range; NO_VALUE for NaN."""
    is_known = ~np.isnan(values)
    level = np.clip((np.where(is_known, values, low) - low) * ((NUM_LEVELS - 1) / (high - low)), 0, NUM_LEVELS - 1)
    return np.where(is_known, np.rint(level), NO_VALUE).astype(np.uint8)


def _tails(found: Floats) -> tuple[float, float]:
    """Return two values: a fraction _TAIL of the values lies below the first, and above the second."""
    last = len(found) - 1
    indices = (min(last, int(_TAIL * len(found))), max(0, last - int(_TAIL * len(found))))
    parted = np.partition(found, indices)
    return float(parted[indices[0]]), float(parted[indices[1]])
