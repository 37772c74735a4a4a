"""Compressed rows: a slice of one flat array for each of many small integer keys."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]


class Rows(NamedTuple):
    """Row r is values[offsets[r] : offsets[r + 1]]."""

    offsets: Index
    values: Index


def group_by(keys: Index, values: Index, num_rows: int) -> Rows:
    """Return the values of each key as rows; the values of a key keep their order."""
    order = np.argsort(keys, kind="stable")
    return Rows(offsets_of(np.bincount(keys, minlength=num_rows)), values[order])


def offsets_of(counts: Index) -> Index:
    """Return the start of each of consecutive slices of these lengths, and the end of the last slice."""
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
    indices: Index = np.repeat(begins - ends + counts, counts) + np.arange(ends[-1])
    return rows.values[indices]
