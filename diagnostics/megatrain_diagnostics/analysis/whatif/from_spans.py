"""Converts recorded spans to the operations of what-if analysis.

The spans of tensor-parallel ranks are combined into one row: a compute lasts from the first start to the last end, a
message or collective from the last start to the last end. Operations of the public format that are not recorded become
rows without work of their own, because readers of the format expect them. A step runs from one optimizer to the next.
Gathers that a step starts after clipping its gradients overlap with the next step, which may not be recorded in full,
so they are moved to the start of their own step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import STAGES
from megatrain_diagnostics.analysis.whatif import kinds
from megatrain_diagnostics.analysis.whatif.operations import JobShape, OperationTable
from megatrain_diagnostics.analysis.whatif.span_fillers import add_missing_rows
from megatrain_diagnostics.analysis.whatif.span_rows import KINDS, NUMBER_OF, Cells, SpanRows, latest_at
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.rows import begins_run, earliest_at, is_any_of
from megatrain_diagnostics.events.tables import Flags, Int64, Spans, select

_OF_A_MICROBATCH = {
    Operation.FORWARD_COMPUTE: kinds.FORWARD,
    Operation.BACKWARD_COMPUTE: kinds.BACKWARD,
    Operation.BACKWARD_WEIGHT_COMPUTE: kinds.BACKWARD_WEIGHT,
    Operation.FORWARD_SEND: kinds.FORWARD_SEND,
    Operation.FORWARD_RECV: kinds.FORWARD_RECV,
    Operation.BACKWARD_SEND: kinds.BACKWARD_SEND,
    Operation.BACKWARD_RECV: kinds.BACKWARD_RECV,
}
_KIND_OF = {
    **_OF_A_MICROBATCH,
    Operation.PARAMS_ALL_GATHER: kinds.PARAMS_GATHER,
    Operation.GRADS_REDUCE_SCATTER: kinds.GRADS_SCATTER,
    Operation.TP_ALL_REDUCE: kinds.NORM_REDUCE,
    Operation.EMBEDDING_ALL_REDUCE: kinds.EMBEDDING_REDUCE,
    Operation.CLIP: kinds.CLIP,
    Operation.OPTIMIZER: kinds.OPTIMIZER,
}
SPAN_OPERATIONS = tuple(operation.number for operation in (*_KIND_OF, Operation.DATA_WAIT))
"""Numbers of the operations whose spans are used here."""
_BACKWARDS = (Operation.BACKWARD_COMPUTE, Operation.BACKWARD_WEIGHT_COMPUTE)
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Times of some operations in ns. Shapes: [lines], each a tensor-parallel rank of a cell."""

    last_backward: Int64
    clip: Int64
    optimizer: Int64
    begin: Int64
    """Start of the step, the same for all its cells. Shape: [cells]."""


@dataclass(frozen=True, slots=True, eq=False)
class SpanPlaces:
    """The operation of the model that each span is a part of. Shapes: all [spans]; -1: not in the model."""

    kind: Int64
    """Index in span_rows.KINDS."""
    sequence: Int64
    stage: Int64
    dp_rank: Int64
    start_ns: Int64
    """Start in the model: gathers after an optimizer are moved to the start of the step."""


def operations_of(spans: Spans, roster: Roster, job: str) -> tuple[OperationTable, JobShape]:
    """Return the operations of the steps that were recorded in full, and the job's shape.

    spans: the spans of the roster's round, with times of one clock. Raises: DataError if no step was recorded in full,
    and for a V-shaped schedule.
    """
    rows, cells, bounds = _numbered_rows(spans, roster)
    rows = _reduced_over_cells(_one_after_the_other(rows, bounds), cells.width)
    rows = _received_before_use(rows, cells)
    shape = _shape(roster, job, cells, rows)
    return _table(add_missing_rows(rows, cells), cells), shape


def places_of(spans: Spans, roster: Roster) -> SpanPlaces:
    """Return for each span its operation in the result of `operations_of`. Raises: DataError."""
    rows, cells, _ = _numbered_rows(spans, roster)
    kind, sequence, stage, dp_rank, start_ns = (np.full(len(spans.rank), -1, dtype=np.int64) for _ in range(5))
    kind[rows.span], sequence[rows.span], start_ns[rows.span] = rows.kind, rows.sequence, rows.start
    dp_rank[rows.span], stage[rows.span], _ = cells.places(rows.cell)
    return SpanPlaces(kind, sequence, stage, dp_rank, start_ns)


def _numbered_rows(spans: Spans, roster: Roster) -> tuple[SpanRows, Cells, _Bounds]:
    """Return a row for each span in the model, of fully recorded steps. Raises: DataError."""
    usable = np.flatnonzero(_is_usable(spans, roster))
    forward = spans.operation[usable] == Operation.FORWARD_COMPUTE.number
    if not forward.any():
        raise DataError(
            f"round {roster.round}: no step was recorded in full; `megatrain diag set --full-for SECONDS` records "
            "every step of a running job in full for a time"
        )
    steps = np.unique(spans.step[usable][forward])
    usable = usable[np.isin(spans.step[usable], steps)]
    spans = select(spans, usable)
    cells = Cells(roster.layout, steps, num_chunks=int(spans.chunk.max(initial=0)) + 1)
    bounds = _bounds(spans, cells)
    rows = _rows(spans, cells, bounds)
    return replace(rows, span=usable[rows.span]), cells, bounds


def _is_usable(spans: Spans, roster: Roster) -> Flags:
    """Return the mask of ended spans with valid ranks and, if needed, chunk and micro-batch."""
    is_numbered = (spans.microbatch >= 0) & (spans.chunk >= 0)
    needs_number = is_any_of(spans.operation, _OF_A_MICROBATCH)
    usable: Flags = (
        (spans.round == roster.round)
        & np.isin(spans.operation, SPAN_OPERATIONS)
        & (spans.duration_ns >= 0)
        & (spans.step >= 0)
        & (spans.rank >= 0)
        & (spans.rank < roster.layout.world_size)
        & (is_numbered | ~needs_number)
    )
    return usable


def _bounds(spans: Spans, cells: Cells) -> _Bounds:
    cell = cells.of_ranks(spans.rank, spans.step)
    line = cells.line(cell, cells.tp_rank(spans.rank))
    end = spans.start_ns + spans.duration_ns
    clip = spans.operation == Operation.CLIP.number
    optimizer = spans.operation == Operation.OPTIMIZER.number
    is_front = ~optimizer & (spans.operation != Operation.PARAMS_ALL_GATHER.number)
    first = earliest_at(len(cells.steps), cell[is_front] % len(cells.steps), spans.start_ns[is_front])
    return _Bounds(
        last_backward=latest_at(cells.num_lines, line, end, is_any_of(spans.operation, _BACKWARDS)),
        clip=latest_at(cells.num_lines, line, spans.start_ns, clip),
        optimizer=latest_at(cells.num_lines, line, end, optimizer),
        begin=np.tile(first, cells.num_pipelines),
    )


def _rows(spans: Spans, cells: Cells, bounds: _Bounds) -> SpanRows:
    """Return one row per span in the model."""
    kind_of = np.full(256, -1, dtype=np.int64)
    for operation, name in _KIND_OF.items():
        kind_of[operation.number] = NUMBER_OF[name]
    kind, cell, tp_rank = kind_of[spans.operation], cells.of_ranks(spans.rank, spans.step), cells.tp_rank(spans.rank)
    line = cells.line(cell, tp_rank)
    last_backward, clip, optimizer = bounds.last_backward[line], bounds.clip[line], bounds.optimizer[line]
    start, end = spans.start_ns.copy(), spans.start_ns + spans.duration_ns
    start = _behind_its_backward(spans, kind, line, cells, start, end)
    end = np.maximum(start, end)
    is_summed = np.isin(kind, [NUMBER_OF[kinds.NORM_REDUCE], NUMBER_OF[kinds.EMBEDDING_REDUCE]])
    # an all-reduce inside a forward pass or an optimizer is a part of that operation, not an operation of the model
    has_place = (kind >= 0) & (~is_summed | ((start >= last_backward) & (start < clip)))
    # forwards of an evaluation have the number of the step before the evaluation
    is_after = (start >= optimizer) & (optimizer > 0)
    has_place &= ~is_after | (kind == NUMBER_OF[kinds.PARAMS_GATHER])
    is_behind = (kind == NUMBER_OF[kinds.PARAMS_GATHER]) & (start >= clip) & (clip > 0)
    shift = np.where(is_behind, optimizer - bounds.begin[cell], 0)
    sequence, span = np.zeros_like(cell), np.arange(len(cell))
    rows = SpanRows(kind, cell, tp_rank, start - shift, end - shift, sequence, spans.chunk, spans.microbatch, span)
    return cells.numbered(rows.where(has_place))


def _behind_its_backward(
    spans: Spans, kind: Int64, line: Int64, cells: Cells, start: NDArray[Any], end: NDArray[Any]
) -> Int64:
    """Return starts in which no reduce-scatter begins before the end of its chunk's last backward.

    Buckets may be reduced during that backward. The replay model starts them after it, so only the time after it
    counts.
    """
    chunk_line = line * cells.num_chunks + np.maximum(spans.chunk, 0)
    is_backward = is_any_of(spans.operation, _BACKWARDS)
    last = latest_at(cells.num_lines * cells.num_chunks, chunk_line, end, is_backward)[chunk_line]
    is_scatter = (kind == NUMBER_OF[kinds.GRADS_SCATTER]) & (spans.chunk >= 0)
    moved: Int64 = np.where(is_scatter, np.maximum(start, last), start)
    return moved


def _one_after_the_other(rows: SpanRows, bounds: _Bounds) -> SpanRows:
    """Return rows in which each data-parallel collective begins no earlier than the end of the previous one.

    A rank launches several collectives ahead, so their spans overlap, but the group runs them in sequence. The wait for
    the previous one is not part of a collective's duration.
    """
    chosen = np.flatnonzero(np.isin(rows.kind, [NUMBER_OF[kinds.PARAMS_GATHER], NUMBER_OF[kinds.GRADS_SCATTER]]))
    order = chosen[np.lexsort((rows.end[chosen], rows.start[chosen], rows.tp_rank[chosen], rows.cell[chosen]))]
    if not len(order):
        return rows
    start = rows.start[order] - bounds.begin[rows.cell[order]]
    end = rows.end[order] - bounds.begin[rows.cell[order]]
    is_first = begins_run(rows.cell[order], rows.tp_rank[order])
    # each lane is shifted to its own range of times, so that one cumulative maximum is enough for all lanes
    lane = np.cumsum(is_first) * (int(end.max()) - int(start.min()) + 1)
    latest = np.maximum.accumulate(end + lane)
    before = np.where(is_first, start, np.roll(latest, 1) - lane)
    moved = rows.start.copy()
    moved[order] = np.minimum(np.maximum(start, before), end) + bounds.begin[rows.cell[order]]
    return replace(rows, start=moved)


def _reduced_over_cells(rows: SpanRows, width: int) -> SpanRows:
    """Combine the rows of the ranks of a cell; operations without a row of every rank are left out."""
    order = np.lexsort((rows.tp_rank, rows.sequence, rows.kind, rows.cell))
    rows = rows.where(order)
    firsts = np.flatnonzero(begins_run(rows.cell, rows.kind, rows.sequence))
    counts = np.diff(np.append(firsts, len(order)))
    reduced = rows.where(firsts)
    is_compute = np.isin(reduced.kind, [NUMBER_OF[kind] for kind in kinds.KNOWN_KINDS - kinds.MEDIAN_KINDS])
    earliest, latest = np.minimum.reduceat(rows.start, firsts), np.maximum.reduceat(rows.start, firsts)
    start = np.where(is_compute, earliest, latest)
    end = np.maximum.reduceat(rows.end, firsts)
    return replace(reduced, start=start, end=end).where(counts == width)


def _received_before_use(rows: SpanRows, cells: Cells) -> SpanRows:
    """Return rows in which no receive begins later than the compute that waits for it.

    Tensor-parallel ranks are not aligned: the combined receive starts at the last rank's start, the compute at the
    first rank's.
    """
    compute = cells.computes_of(rows)
    is_receive = (compute >= 0) & rows.of(kinds.FORWARD_RECV, kinds.BACKWARD_RECV)
    return replace(rows, start=np.where(is_receive, np.minimum(rows.start, rows.start[compute]), rows.start))


def _table(rows: SpanRows, cells: Cells) -> OperationTable:
    dp_rank, stage, step = cells.places(rows.cell)
    begin = earliest_at(len(cells.steps), step, rows.start)
    is_compute = rows.of(*kinds.COMPUTES)
    return OperationTable(
        kinds=KINDS,
        dp_rank=dp_rank,
        stage=stage,
        rank=stage * cells.layout.stride(STAGES) + dp_rank * cells.width,
        step=cells.steps[step].astype(np.int64),
        kind=rows.kind,
        start_s=(rows.start - begin[step]) / _NS_PER_S,
        duration_s=(rows.end - rows.start) / _NS_PER_S,
        sequence=rows.sequence,
        chunk=rows.chunk.astype(np.int64),
        model_chunk=np.where(is_compute, cells.model_chunk(stage, rows.chunk), -1).astype(np.int64),
        microbatch=np.where(is_compute, rows.microbatch, -1).astype(np.int64),
    )


def _shape(roster: Roster, job: str, cells: Cells, rows: SpanRows) -> JobShape:
    """Return the job's shape. Raises: DataError if the messages in `rows` are those of a V-shaped schedule."""
    layout = roster.layout
    if cells.num_chunks > 1 and layout.pp_size > 1 and _is_v_shaped(cells, rows):
        raise DataError(
            f"round {roster.round}: the last stage sends no result of its first chunk, so the schedule is V-shaped; "
            "what-if analysis knows only schedules whose passes all begin at the first stage: run the job with one of "
            "them to analyze it"
        )
    return JobShape(
        trial_name=job,
        run_id=roster.round,
        dp_size=layout.dp_size,
        pp_size=layout.pp_size,
        tp_size=layout.tp_size,
        dsp_size=layout.size("cp"),
        num_chunks=cells.num_chunks,
        world_size=layout.world_size,
    )


def _is_v_shaped(cells: Cells, rows: SpanRows) -> bool:
    """Return whether the last stage keeps the result of its first chunk, although stages send those of other chunks."""
    _, stage, _ = cells.places(rows.cell)
    of_turn = (stage == cells.layout.pp_size - 1) & (rows.chunk == 0)
    sends = rows.of(kinds.FORWARD_SEND)
    return bool(sends.any() and (rows.of(kinds.FORWARD) & of_turn).any() and not (sends & of_turn).any())
