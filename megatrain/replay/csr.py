"""Compressed rows: for each of many small keys, a slice of one flat array."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]

Numbers = NDArray[Any]
"""int64 where everything given is integer, so that results are exact; else float64."""


class Rows(NamedTuple):
    """Row r is values[offsets[r] : offsets[r + 1]]."""

    offsets: Index
    values: Index


def group_by(keys: Index, values: Index, num_rows: int) -> Rows:
    """Return the values of each key, equal keys in the order given."""
    order = np.argsort(keys, kind="stable")
    return Rows(offsets_of(np.bincount(keys, minlength=num_rows)), values[order])


def offsets_of(counts: Index) -> Index:
    """Return where each of consecutive slices of these lengths starts, and where the last one ends."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def concatenate(rows: Rows, selected: Index) -> Index:
    """Return the values of the selected rows, one row after the other."""
    begins = rows.offsets[selected]
    counts = rows.offsets[selected + 1] - begins
    ends = np.cumsum(counts)
    if len(ends) == 0 or ends[-1] == 0:
        return np.empty(0, dtype=np.int64)
    places: Index = np.repeat(begins - ends + counts, counts) + np.arange(ends[-1])
    return rows.values[places]
