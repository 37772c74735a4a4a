"""Medians, of which the detection of slow ranks takes dozens in each step.

np.median gives the same values, but takes five times as long for small arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def medians(values: NDArray[Any], axis: int) -> Floats:
    """Return the medians along an axis with at least one element; NaN where one of the values is NaN.

    Shapes: the result is that of `values` without the axis.
    """
    ordered = np.sort(values, axis=axis)
    count = ordered.shape[axis]
    lower, upper, last = (ordered.take(place, axis) for place in ((count - 1) // 2, count // 2, count - 1))
    # NaN is sorted to the end
    found: Floats = np.where(last != last, last, (lower + upper) / 2.0)
    return found


def median(values: NDArray[Any]) -> float:
    """Return the median of all values, of which none is NaN."""
    middle = values.size // 2
    lower = middle - 1 + values.size % 2
    parted = np.partition(values, (lower, middle), axis=None)
    return float(parted[lower] + parted[middle]) / 2.0
