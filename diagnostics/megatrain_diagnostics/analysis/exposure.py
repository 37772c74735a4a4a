"""Assigns all time of ranks' steps to categories: each moment of a rank's step belongs to exactly one category.

A rank's window of a step is cut into pieces wherever a span begins or ends. Of the operations that run in a piece, the
first in this order counts: garbage collection, checkpoint, evaluation, data, compute, clip and optimizer. Other pieces
belong to exposed communication, or to no timed operation.
Communication is exposed while nothing else runs, if it ends before something else begins. Of several exchanges, the one
for which the CPU thread waited, by its own report, is chosen, or else the one that ended first. Inside compute only
tensor-parallel collectives can be exposed, and inside clip and optimizer only all-reduces and the exchange of matrices.
Communication is overlapped while one of the layers runs and the rank waits for nothing. All times are integers, so the
parts of a window add up to it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.black_box.operations import (
    AXIS_ALL_REDUCES,
    MAX_OPERATIONS,
    MODEL_COMPUTES,
    TP_COLLECTIVES,
    Operation,
)
from megatrain.contracts.black_box.values import ATTENDED_MASK, ATTENDED_SHIFT, ATTENDED_STEPS
from megatrain_diagnostics.analysis.exchanges import Exchanges, end_ns
from megatrain_diagnostics.analysis.window_pieces import (
    Grid,
    Windows,
    covered_ns,
    cut_windows,
    piece_times,
    pieces_at,
    pieces_of,
    rank_indices,
    run_ends,
)
from megatrain_diagnostics.events.rows import ABSENT, is_any_of
from megatrain_diagnostics.events.tables import NO_DURATION, Int64, Spans


class Category(StrEnum):
    """The categories of a step's time."""

    COMPUTE = "compute"
    REDUCE_SCATTER = "dp-reduce-scatter"
    ALL_GATHER = "dp-all-gather"
    TP = "tp"
    PP = "pp"
    OTHER_COMMUNICATION = "other-communication"
    """All-reduces of counts, norms and tied embeddings, exchange of matrices for their update, barriers, checksums."""
    BUBBLE = "bubble"
    """Waiting for a neighbor stage that had nothing to send yet, or could not yet receive."""
    DATA = "data"
    OPTIMIZER = "optimizer"
    GC = "gc"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    OTHER = "other"
    """No timed operation ran, or only communication that the rank did not wait for."""


CATEGORIES = tuple(Category)
_INDEX = {category: index for index, category in enumerate(CATEGORIES)}
COMMUNICATION = (
    Category.REDUCE_SCATTER,
    Category.ALL_GATHER,
    Category.TP,
    Category.PP,
    Category.OTHER_COMMUNICATION,
)

# from the lowest to the highest layer
_LAYERS: tuple[tuple[Category, tuple[Operation, ...]], ...] = (
    (Category.OPTIMIZER, (Operation.CLIP, Operation.OPTIMIZER)),
    (Category.COMPUTE, MODEL_COMPUTES),
    (Category.DATA, (Operation.DATA_WAIT,)),
    (Category.EVALUATION, (Operation.EVALUATION,)),
    (Category.CHECKPOINT, (Operation.CHECKPOINT, Operation.CHECKPOINT_LOAD, Operation.CHECKPOINT_EXCHANGE)),
    (Category.GC, (Operation.GC,)),
)
_COMMUNICATION_OF: dict[Operation, Category] = {
    Operation.GRADS_REDUCE_SCATTER: Category.REDUCE_SCATTER,
    Operation.PARAMS_ALL_GATHER: Category.ALL_GATHER,
    Operation.FORWARD_SEND: Category.PP,
    Operation.FORWARD_RECV: Category.PP,
    Operation.BACKWARD_SEND: Category.PP,
    Operation.BACKWARD_RECV: Category.PP,
    **dict.fromkeys(AXIS_ALL_REDUCES, Category.OTHER_COMMUNICATION),
    **dict.fromkeys(TP_COLLECTIVES, Category.TP),  # TP_ALL_REDUCE is in AXIS_ALL_REDUCES too
    Operation.EMBEDDING_ALL_REDUCE: Category.OTHER_COMMUNICATION,
    Operation.UPDATES_ALL_TO_ALL: Category.OTHER_COMMUNICATION,
    Operation.BARRIER: Category.OTHER_COMMUNICATION,
    Operation.CHECKSUM: Category.OTHER_COMMUNICATION,
}
"""Every exchange has a row, or is in a layer."""
_IN_OPTIMIZER = (*AXIS_ALL_REDUCES, Operation.UPDATES_ALL_TO_ALL)


@dataclass(frozen=True, slots=True, eq=False)
class Exposure:
    """The time of the windows by category. Units: ns."""

    windows: Windows
    spent_ns: Int64
    """Shape: [windows, categories]; a row adds up to the length of its window."""
    waiting_ns: Int64
    """Shape: [windows, categories]. The part of exposed communication before the last peer began."""
    exposed_ns: Int64
    """Exposed time of each span."""
    span_waiting_ns: Int64
    """Part of each span's exposed time before the last peer began; for pipeline links it is counted as bubble."""
    overlapped_ns: Int64
    """Time of each span that overlapped with work of its rank."""
    inside_ns: Int64
    """Time of each span within the windows."""


def expose(spans: Spans, exchanges: Exchanges, windows: Windows) -> Exposure:
    """Return the time of the windows by category. `spans`: spans of the same ranks, in any step."""
    num = len(CATEGORIES)
    if not len(windows):
        none = np.zeros((0, num), dtype=np.int64)
        return Exposure(windows, none, none, *(np.zeros_like(spans.start_ns) for _ in range(4)))
    arrived = exchanges.arrived_ns(spans)
    rank_index = rank_indices(spans, windows)
    awaited = awaited_since_ns(spans)
    grid = cut_windows(spans, (arrived, awaited), rank_index, windows)
    low, high = pieces_of(spans, rank_index, grid)
    owner = _paint_layers(spans, low, high, len(grid.begin))
    blamed = _held_up_by(spans, (low, pieces_at(awaited, rank_index, grid), high), owner, grid)
    # a piece of compute that waits for an exchange is exposed communication, not work that overlaps with it
    is_worked = (owner != _INDEX[Category.OTHER]) & (blamed == ABSENT)
    category = _categories(spans, owner, blamed)
    at_ns = piece_times(grid)
    exposed = np.flatnonzero(blamed != ABSENT)
    # the grid is cut at the arrivals, so a piece lies entirely before or entirely after the last peer arrived
    waits = exposed[at_ns[exposed] < arrived[blamed[exposed]]]
    # waiting for a late neighbor stage is the bubble; waiting for late members of a collective is reported separately
    span_waiting_ns = _totals(blamed[waits], grid.length[waits], len(spans.rank))
    is_link = category[waits] == _INDEX[Category.PP]
    # moved from pp to the bubble before `spent_ns` is summed, so that a row adds up to its window
    category[waits[is_link]] = _INDEX[Category.BUBBLE]
    waits = waits[~is_link]

    def summed(pieces: NDArray[np.int64]) -> Int64:
        # one number for each (window, category), so that one sum over all pieces fills the whole matrix
        cells = grid.window[pieces] * num + category[pieces]
        return _totals(cells, grid.length[pieces], len(windows) * num).reshape(-1, num)

    return Exposure(
        windows=windows,
        spent_ns=summed(np.flatnonzero(grid.window != ABSENT)),
        waiting_ns=summed(waits),
        exposed_ns=_totals(blamed[exposed], grid.length[exposed], len(spans.rank)),
        span_waiting_ns=span_waiting_ns,
        overlapped_ns=covered_ns(grid, is_worked & (grid.window != ABSENT), low, high),
        inside_ns=covered_ns(grid, grid.window != ABSENT, low, high),
    )


def awaited_since_ns(spans: Spans) -> Int64:
    """Return when the CPU thread began to wait for the end of each span.

    It is the span's start if the CPU thread reports nothing, and its end if the thread did not wait. The record has
    only the total of waiting and launching, which is placed at the end of the span.
    """
    # the flags have the share plus one, because 0 means that the CPU thread reports nothing
    share = ((spans.flags.astype(np.int64) >> ATTENDED_SHIFT) & ATTENDED_MASK) - 1
    length = np.maximum(spans.duration_ns, 0)
    attended = np.where(share < 0, length, (length * share + ATTENDED_STEPS // 2) // ATTENDED_STEPS)
    since: Int64 = end_ns(spans) - attended
    return since


def _totals(cells: Int64, amounts: Int64, num_cells: int) -> Int64:
    """Sum amounts by cell, in integers (bincount would use floats)."""
    found = np.zeros(num_cells, dtype=np.int64)
    np.add.at(found, cells, amounts)
    return found


def _paint_layers(spans: Spans, low: Int64, high: Int64, num_pieces: int) -> NDArray[np.int8]:
    """Return the category of each piece, ignoring communication."""
    owner = np.full(num_pieces, _INDEX[Category.OTHER], dtype=np.int8)
    for category, operations in _LAYERS:  # a later layer covers the earlier ones
        rows = np.flatnonzero(is_any_of(spans.operation, operations) & (high > low))
        for begin, end in zip(low[rows].tolist(), high[rows].tolist(), strict=True):
            owner[begin:end] = _INDEX[category]
    return owner


def _held_up_by(
    spans: Spans, pieces: tuple[Int64, Int64, Int64], owner: NDArray[np.int8], grid: Grid
) -> NDArray[np.int64]:
    """Return for each piece the communication span that it waits for; -1: none.

    pieces: for each span its first piece, the first piece in which the CPU thread waits for it, and the end, exclusive.
    """
    low, awaited, high = pieces
    is_communication = is_any_of(spans.operation, _COMMUNICATION_OF)
    rows = np.flatnonzero(is_communication & (high > low) & (spans.duration_ns != NO_DURATION))
    last = end_ns(spans)
    # sorted by descending end: in `_painted` later rows cover earlier ones, so the exchange that ends first is chosen
    rows = rows[np.argsort(-last[rows], kind="stable")]
    in_gaps = _painted(rows, low, high, len(owner))
    # an exchange for which the CPU thread waited, by its own report, takes precedence
    is_attended = (spans.flags[rows].astype(np.int64) >> ATTENDED_SHIFT) & ATTENDED_MASK != 0
    attended = _painted(rows[is_attended], awaited, high, len(owner))
    in_gaps = np.where(attended != ABSENT, attended, in_gaps)
    gap_end = run_ends(owner, grid)
    open_there = np.flatnonzero((owner == _INDEX[Category.OTHER]) & (in_gaps != ABSENT) & (grid.window != ABSENT))
    # if an exchange ends after the gap, the rank did not wait for it
    ends_within = last[in_gaps[open_there]] <= gap_end[open_there]
    blamed = np.full(len(owner), ABSENT, dtype=np.int64)
    blamed[open_there[ends_within]] = in_gaps[open_there[ends_within]]
    for category, operations in ((Category.COMPUTE, TP_COLLECTIVES), (Category.OPTIMIZER, _IN_OPTIMIZER)):
        nested = rows[is_any_of(spans.operation[rows], operations)]
        index = _INDEX[category]
        # inside compute (or the optimizer), a rank waits only for an exchange that begins and ends there
        is_inside = (owner[low[nested]] == index) & (owner[high[nested] - 1] == index)
        inside = _painted(nested[is_inside], awaited, high, len(owner))
        chosen = np.flatnonzero((owner == index) & (inside != ABSENT))
        blamed[chosen] = inside[chosen]
    return blamed


def _painted(rows: Int64, low: Int64, high: Int64, num_pieces: int) -> NDArray[np.int64]:
    """Return for each piece the last of `rows` that covers it; -1: none."""
    found = np.full(num_pieces, ABSENT, dtype=np.int64)
    for row, begin, end in zip(rows.tolist(), low[rows].tolist(), high[rows].tolist(), strict=True):
        found[begin:end] = row
    return found


def _categories(spans: Spans, owner: NDArray[np.int8], blamed: NDArray[np.int64]) -> NDArray[np.int8]:
    of_operation = np.full(MAX_OPERATIONS, _INDEX[Category.OTHER_COMMUNICATION], dtype=np.int8)
    for operation, of_it in _COMMUNICATION_OF.items():
        of_operation[operation.number] = _INDEX[of_it]
    category = owner.copy()  # `owner` is read again below
    held = np.flatnonzero(blamed != ABSENT)
    category[held] = of_operation[spans.operation[blamed[held]]]
    # the norm of the gradients is summed along every axis: it is not communication of tensor-parallel layers
    in_optimizer = held[owner[held] == _INDEX[Category.OPTIMIZER]]
    category[in_optimizer] = _INDEX[Category.OTHER_COMMUNICATION]
    return category
