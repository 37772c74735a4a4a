"""Adds parts of the public format that are not recorded: chunks of collectives, unsent messages, empty operations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatrain_diagnostics.analysis.whatif import kinds
from megatrain_diagnostics.analysis.whatif.span_rows import NUMBER_OF, Cells, SpanRows, latest_at
from megatrain_diagnostics.events.rows import begins_run
from megatrain_diagnostics.events.tables import Int64


def add_missing_rows(rows: SpanRows, cells: Cells) -> SpanRows:
    """Return the rows with chunks of gathers and reduce-scatters, and all rows that readers of the format expect."""
    rows = replace(rows, chunk=_chunks(rows, cells))
    if cells.num_chunks > 1 and cells.layout.pp_size > 1:
        rows = rows.and_also(*_unsent_messages(rows, cells))
    rows = _in_order(rows, cells)
    return rows.and_also(*_empty_operations(rows, cells))


def _chunks(rows: SpanRows, cells: Cells) -> Int64:
    """Assign the collectives of a cell to its chunks: gathers from the first on, reduce-scatters from the last."""
    chunk = rows.chunk.astype(np.int64)
    for kind, is_reversed in ((kinds.PARAMS_GATHER, False), (kinds.GRADS_SCATTER, True)):
        chosen = rows.of(kind)
        counts = np.bincount(rows.cell[chosen], minlength=cells.num_cells)[rows.cell[chosen]]
        each = np.maximum(counts // cells.num_chunks, 1)
        dealt = rows.sequence[chosen] // each
        dealt = cells.num_chunks - 1 - dealt if is_reversed else dealt
        # if the number is not divisible, all are assigned to the first chunk, which is gathered first and reduced last
        chunk[chosen] = np.where(counts % cells.num_chunks == 0, dealt, 0)
    return chunk


def _unsent_messages(rows: SpanRows, cells: Cells) -> list[SpanRows]:
    """Return rows without duration for the messages of the model's input and loss."""
    _, stage, _ = cells.places(rows.cell)
    model_chunk = cells.model_chunk(stage, rows.chunk)
    is_input = model_chunk == 0
    is_loss = model_chunk == cells.layout.pp_size * cells.num_chunks - 1
    forward, backward = rows.of(kinds.FORWARD), rows.of(kinds.BACKWARD)
    return [
        _without_duration(rows.where(chosen), kind, at_end)
        for kind, chosen, at_end in (
            (kinds.FORWARD_RECV, forward & is_input, False),
            (kinds.FORWARD_SEND, forward & is_loss, True),
            (kinds.BACKWARD_RECV, backward & is_loss, False),
            (kinds.BACKWARD_SEND, backward & is_input, True),
        )
    ]


def _without_duration(computes: SpanRows, kind: str, at_end: bool) -> SpanRows:
    time = computes.end if at_end else computes.start
    made = np.full_like(computes.kind, NUMBER_OF[kind])
    return replace(computes, kind=made, start=time, end=time, span=np.full_like(computes.span, -1))


def _in_order(rows: SpanRows, cells: Cells) -> SpanRows:
    """Return rows in which messages of a kind begin in the order of their computes, as in one channel."""
    order = np.lexsort((rows.sequence, rows.kind, rows.cell))
    rows = rows.where(order)
    line = rows.cell * (len(NUMBER_OF) + 1) + rows.kind
    is_message = rows.of(*kinds.MESSAGES)
    # a receive without a sender begins with its compute, so the next receive, posted earlier, is moved to this time
    start = rows.start.copy()
    times, place = np.unique(start, return_inverse=True)
    offset = np.cumsum(begins_run(line)) * len(times)
    lifted = times[np.maximum.accumulate(place + offset) - offset]
    start[is_message] = lifted[is_message]
    return replace(rows, start=start, end=np.maximum(rows.end, start))


def _empty_operations(rows: SpanRows, cells: Cells) -> list[SpanRows]:
    """Return rows for each kind that is not recorded; if cells carry it out together, it ends when the last begins."""
    backward_end = latest_at(cells.num_cells, rows.cell, rows.end, rows.of(*kinds.COMPUTES))
    ready = np.maximum(backward_end, latest_at(cells.num_cells, rows.cell, rows.end, rows.of(kinds.GRADS_SCATTER)))
    clip = np.maximum(ready, latest_at(cells.num_cells, rows.cell, rows.start, rows.of(kinds.CLIP)))
    present = np.flatnonzero(backward_end)
    _, stage, _ = cells.places(present)
    is_end = (stage == 0) | (stage == cells.layout.pp_size - 1)
    made = [_rows_at(kinds.GC, present, backward_end, backward_end, chunk=0)]
    if not rows.of(kinds.NORM_REDUCE).any():
        made.append(_rows_at(kinds.NORM_REDUCE, present, ready, ready))
    if not rows.of(kinds.EMBEDDING_REDUCE).any():
        made.append(_rows_at(kinds.EMBEDDING_REDUCE, present[is_end], ready, _latest_of_ends(ready, cells)))
    if rows.of(kinds.GRADS_SCATTER).any():
        made.append(_rows_at(kinds.SEPARATE_REDUCE, present, clip, _latest_of_replicas(clip, cells)))
    return made


def _latest_of_ends(times: Int64, cells: Cells) -> Int64:
    """Return for each cell the later time of the first and the last stage of its pipeline."""
    shaped = times.reshape(cells.layout.dp_size, cells.layout.pp_size, len(cells.steps))
    latest = shaped[:, [0, -1]].max(axis=1, keepdims=True)
    return np.broadcast_to(latest, shaped.shape).reshape(-1)


def _latest_of_replicas(times: Int64, cells: Cells) -> Int64:
    """Return for each cell the latest time of all data-parallel ranks of its stage."""
    shaped = times.reshape(cells.layout.dp_size, cells.layout.pp_size, len(cells.steps))
    return np.broadcast_to(shaped.max(axis=0, keepdims=True), shaped.shape).reshape(-1)


def _rows_at(kind: str, cell: Int64, start: Int64, end: Int64, chunk: int = -1) -> SpanRows:
    def every(value: int) -> NDArray[np.int64]:
        return np.full(len(cell), value, dtype=np.int64)

    begin, finish = start[cell], end[cell]
    return SpanRows(
        every(NUMBER_OF[kind]), cell, every(0), begin, finish, every(0), every(chunk), every(-1), span=every(-1)
    )
