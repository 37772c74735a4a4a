"""Questions about the rows of tables: which are of some operations, which have equal keys, and when the first began."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.black_box.operations import Operation
from megatrain_diagnostics.events.tables import Flags, Int8, Int64

ABSENT = -1
"""An index that means: there is no such row, key or window."""
LOWER_32 = 0xFFFFFFFF
"""The bits of `pair_keys` that hold the second number."""


def is_any_of(operation: Int8, operations: Iterable[Operation]) -> Flags:
    """Return the mask of the rows with one of these operations. `operation`: the column of operation numbers."""
    found: Flags = np.isin(operation, [wanted.number for wanted in operations])
    return found


def pair_keys(first: NDArray[Any], second: NDArray[Any]) -> Int64:
    """Return one number for each pair of numbers, by which pairs sort. The second must not be negative."""
    keys: Int64 = first.astype(np.int64) << 32 | second.astype(np.int64)
    return keys


def begins_run(*keys: NDArray[Any]) -> Flags:
    """Return the mask of the rows with which a run of equal keys begins. Shapes: all [rows]."""
    is_first = np.ones(len(keys[0]), dtype=bool)
    is_first[1:] = np.any([np.diff(key) != 0 for key in keys], axis=0)
    return is_first


def positions_of(wanted: NDArray[Any], keys: NDArray[Any]) -> Int64:
    """Return the index of each wanted key in `keys`, which are ascending; ABSENT if it is not among them."""
    if not len(keys):
        return np.full(len(wanted), ABSENT, dtype=np.int64)
    # searchsorted returns an index after the end for larger keys
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, index, ABSENT)


def earliest_at(num_places: int, place: Int64, times_ns: Int64) -> Int64:
    """Return the earliest time at each place; the largest integer at a place without a time.

    Shapes: place, times_ns [rows]; result [places].
    """
    found = np.full(num_places, np.iinfo(np.int64).max)
    np.minimum.at(found, place, times_ns)
    return found
