"""Rows of operations by cell. A cell is one stage of one data-parallel rank in one step."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.layout import STAGES, Layout
from megatrain.schedule import ChunkPlacement
from megatrain_diagnostics.analysis.whatif import kinds
from megatrain_diagnostics.analysis.whatif.operations import ranks_per_row
from megatrain_diagnostics.events.rows import ABSENT, begins_run, positions_of
from megatrain_diagnostics.events.tables import Int64

KINDS = tuple(sorted(kinds.KNOWN_KINDS))
NUMBER_OF = {kind: number for number, kind in enumerate(KINDS)}
_COMPUTE_OF = {
    kinds.FORWARD_SEND: kinds.FORWARD, kinds.FORWARD_RECV: kinds.FORWARD,
    kinds.BACKWARD_SEND: kinds.BACKWARD, kinds.BACKWARD_RECV: kinds.BACKWARD,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SpanRows:
    """Columns of equal length; times in ns."""

    kind: Int64
    cell: Int64
    tp_rank: Int64
    start: Int64
    end: Int64
    sequence: Int64
    chunk: NDArray[Any]
    microbatch: NDArray[Any]
    span: Int64
    """Index of the span from which a row was made; -1: none."""

    def where(self, chosen: NDArray[np.bool_] | Int64) -> SpanRows:
        return SpanRows(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def of(self, *names: str) -> NDArray[np.bool_]:
        """Return which rows are of these kinds."""
        return np.isin(self.kind, [NUMBER_OF[name] for name in names])

    def and_also(self, *others: SpanRows) -> SpanRows:
        parts = (self, *others)
        return SpanRows(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells of some steps: cell = (dp_rank * pp_size + stage) * number of steps + index of the step."""

    layout: Layout
    steps: NDArray[Any]
    num_chunks: int

    @property
    def num_pipelines(self) -> int:
        return self.layout.dp_size * self.layout.pp_size

    def model_chunk(self, stage: Int64, chunk: NDArray[Any]) -> Int64:
        """Return the index in the whole model of each of these chunks of these stages."""
        placement = ChunkPlacement(self.layout.pp_size, self.num_chunks)
        stages, chunks = range(placement.pp_size), range(placement.num_chunks)
        by_stage = np.array([[placement.model_chunk(one, other) for other in chunks] for one in stages])
        parts: Int64 = by_stage[stage, chunk]
        return parts

    @property
    def num_cells(self) -> int:
        return self.num_pipelines * len(self.steps)

    def of_ranks(self, rank: NDArray[Any], step: NDArray[Any]) -> Int64:
        """Return the cell of each (rank, step); each step must be in `steps`."""
        stage, in_stage = np.divmod(rank.astype(np.int64), self.layout.stride(STAGES))
        dp_rank = in_stage // self.width
        return (dp_rank * self.layout.pp_size + stage) * len(self.steps) + np.searchsorted(self.steps, step)

    @property
    def num_lines(self) -> int:
        return self.num_cells * self.width

    @property
    def width(self) -> int:
        """Number of ranks in a cell."""
        return ranks_per_row(self.layout.world_size, self.num_pipelines)

    def tp_rank(self, rank: NDArray[Any]) -> Int64:
        """Return the index of each rank in its cell, along tp and the other axes inside dp."""
        return rank.astype(np.int64) % self.width

    def line(self, cell: Int64, tp_rank: Int64) -> Int64:
        """Return the number of each line. A line is one rank of a cell."""
        return cell * self.width + tp_rank

    def places(self, cell: Int64) -> tuple[Int64, Int64, Int64]:
        """Return the data-parallel rank, the stage and the index of the step of each cell."""
        pipeline, step = np.divmod(cell, len(self.steps))
        dp_rank, stage = np.divmod(pipeline, self.layout.pp_size)
        return dp_rank, stage, step

    def numbered(self, rows: SpanRows) -> SpanRows:
        """Number the operations of a kind in each line, by start.

        A message gets the number of its compute; a message without a compute is left out.
        """
        order = np.lexsort((rows.start, rows.kind, rows.tp_rank, rows.cell))
        rows = rows.where(order)
        line = self.line(rows.cell, rows.tp_rank) * len(KINDS) + rows.kind
        places = np.arange(len(line))
        sequence = places - np.maximum.accumulate(np.where(begins_run(line), places, 0))
        compute = self.computes_of(rows)
        sequence = np.where(compute >= 0, sequence[compute], sequence)
        return replace(rows, sequence=sequence).where(~rows.of(*kinds.MESSAGES) | (compute >= 0))

    def computes_of(self, rows: SpanRows) -> Int64:
        """Return the row of each message's compute; ABSENT if it is missing, and for rows that are not messages."""
        compute_kind = np.full(len(KINDS), -1, dtype=np.int64)
        for message, compute in _COMPUTE_OF.items():
            compute_kind[NUMBER_OF[message]] = NUMBER_OF[compute]
        messages, computes = np.flatnonzero(rows.of(*kinds.MESSAGES)), np.flatnonzero(rows.of(*kinds.COMPUTES))
        found = np.full(len(rows.kind), ABSENT, dtype=np.int64)
        if not len(computes):
            return found
        identity = self._identity(rows, np.where(rows.of(*kinds.MESSAGES), compute_kind[rows.kind], rows.kind))
        known, first = np.unique(identity[computes], return_index=True)
        at = positions_of(identity[messages], known)
        found[messages] = np.where(at >= 0, computes[first][at], ABSENT)
        return found

    def _identity(self, rows: SpanRows, kind: Int64) -> Int64:
        """Return a unique number for each (cell, tensor-parallel rank, kind, chunk, micro-batch)."""
        line = self.line(rows.cell, rows.tp_rank) * len(KINDS) + kind
        num_microbatches = int(rows.microbatch.max(initial=0)) + 1
        num_chunks = int(rows.chunk.max(initial=0)) + 1
        identity: Int64 = (line * num_chunks + rows.chunk) * num_microbatches + rows.microbatch
        return identity


def latest_at(num_places: int, place: Int64, times: Int64, chosen: NDArray[np.bool_]) -> Int64:
    """Return the latest of the chosen times at each place; 0 if there is none."""
    found = np.zeros(num_places, dtype=np.int64)
    np.maximum.at(found, place[chosen], times[chosen])
    return found
