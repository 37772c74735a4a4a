"""Cuts the windows of steps into pieces wherever a span begins or ends, with all ranks in sequence on one time axis.

On this axis the pieces of all ranks are one sorted array, so that one search finds the pieces of all spans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain_diagnostics.analysis.exchanges import end_ns
from megatrain_diagnostics.events.rows import ABSENT, positions_of
from megatrain_diagnostics.events.tables import NO_DURATION, Int32, Int64, Spans


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The windows of steps, ordered by (rank, begin); windows of one rank do not overlap."""

    rank: Int32
    step: Int32
    begin_ns: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The pieces of the windows of all ranks, in sequence on one time axis. Shapes: [pieces]; rank_* [ranks]."""

    begin: Int64
    length: Int64
    window: Int64
    """Window of each piece; ABSENT: none."""
    rank_base: Int64
    rank_limit: Int64
    rank_offset: Int64
    """Position of each rank's base on the axis."""


def rank_indices(spans: Spans, windows: Windows) -> Int64:
    """Return for each span the index of its rank among the ranks with windows; ABSENT: the rank has no window."""
    return positions_of(spans.rank, np.unique(windows.rank))


def cut_windows(spans: Spans, moments_ns: tuple[Int64, ...], rank_index: Int64, windows: Windows) -> Grid:
    """Return the grid with cuts at each span's start and end, and at its times in each array of `moments_ns`.

    Shapes: rank_index and each array of moments_ns [spans]. rank_index: from `rank_indices`.
    """
    ranks, first = np.unique(windows.rank, return_index=True)
    base = windows.begin_ns[first]
    limit = np.maximum.reduceat(windows.end_ns, first)  # windows are ordered by rank: one run for each rank
    # one ns more than the length of a rank, so that its end and the start of the next rank are different cuts
    offset = np.concatenate(([0], np.cumsum(limit - base + 1)))[:-1]
    of_window = np.searchsorted(ranks, windows.rank)

    def on_axis(times_ns: Int64, index: Int64) -> Int64:
        # times outside the rank's windows are clipped to them, so that they are not in the range of another rank
        placed: Int64 = offset[index] + np.clip(times_ns, base[index], limit[index]) - base[index]
        return placed

    has = np.flatnonzero(rank_index != ABSENT)
    shift = offset[of_window] - base[of_window]
    begins, ends = windows.begin_ns + shift, windows.end_ns + shift
    marks = [
        begins,
        ends,
        on_axis(spans.start_ns[has], rank_index[has]),
        on_axis(end_ns(spans)[has], rank_index[has]),
        *(on_axis(moment_ns[has], rank_index[has]) for moment_ns in moments_ns),
    ]
    cuts = np.unique(np.concatenate(marks))
    begin, length = cuts[:-1], np.diff(cuts)
    # the last window that begins at or before the piece
    window = np.searchsorted(begins, begin, side="right") - 1
    window[begin >= ends[window]] = ABSENT  # between two windows, or between two ranks
    return Grid(begin, length, window, base, limit, offset)


def pieces_of(spans: Spans, rank_index: Int64, grid: Grid) -> tuple[Int64, Int64]:
    """Return the range of pieces that each span covers, [first, last); empty for spans without a window."""
    # the end of an open span is not known, so it lasts to the end of the rank's windows
    last = np.where(spans.duration_ns == NO_DURATION, grid.rank_limit[np.maximum(rank_index, 0)], end_ns(spans))
    return pieces_at(spans.start_ns, rank_index, grid), pieces_at(last, rank_index, grid)


def pieces_at(times_ns: Int64, rank_index: Int64, grid: Grid) -> Int64:
    """Return the piece that begins at each span's time, which is one of the cuts; 0 for spans without a window."""
    rank = np.maximum(rank_index, 0)  # spans without a window look up any rank; the last line discards the result
    base, limit, offset = grid.rank_base[rank], grid.rank_limit[rank], grid.rank_offset[rank]
    found = np.searchsorted(grid.begin, offset + np.clip(times_ns, base, limit) - base).astype(np.int64)
    return np.where(rank_index == ABSENT, 0, found)


def covered_ns(grid: Grid, is_chosen: NDArray[np.bool_], low: Int64, high: Int64) -> Int64:
    """Return for each span the total length of the chosen pieces from `low` to `high` (exclusive)."""
    # cumulative sums, so that the sum over a range of pieces is one difference
    until = np.concatenate(([0], np.cumsum(np.where(is_chosen, grid.length, 0))))
    lengths: Int64 = until[np.maximum(high, low)] - until[low]
    return lengths


def run_ends(owner: NDArray[np.int8], grid: Grid) -> Int64:
    """Return for each piece the end of its run of pieces with the same owner and rank, in ns of its rank's time.

    owner: a number for each piece, such as its category. Shapes: owner and result [pieces].

    A run also ends at the end of a window without an adjacent next window, because the time after it is not known.
    """
    rank = _piece_ranks(grid)
    is_outside = grid.window == ABSENT
    # a run ends where the owner or the rank changes, and where a gap between windows begins or ends
    changes = np.flatnonzero((np.diff(owner) != 0) | (np.diff(rank) != 0) | np.diff(is_outside)) + 1
    last = np.concatenate((changes, [len(owner)])) - 1
    lengths = np.diff(np.concatenate(([0], changes, [len(owner)])))
    ends = piece_times(grid)[last] + grid.length[last]
    return np.repeat(np.minimum(ends, grid.rank_limit[rank[last]]), lengths)


def _piece_ranks(grid: Grid) -> Int64:
    found: Int64 = np.searchsorted(grid.rank_offset, grid.begin, side="right") - 1
    return found


def piece_times(grid: Grid) -> Int64:
    """Return the start of each piece, in ns of its rank's time."""
    rank = _piece_ranks(grid)
    times: Int64 = grid.begin - grid.rank_offset[rank] + grid.rank_base[rank]
    return times
