"""Rows of operations by cell, a cell being one data-parallel rank's stage in one step."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.layout import Layout
from megatrain_diagnostics.analysis.whatif import kinds
from megatrain_diagnostics.analysis.whatif.operations import Ints

KINDS = tuple(sorted(kinds.KNOWN_KINDS))
NUMBER_OF = {kind: number for number, kind in enumerate(KINDS)}
_COMPUTE_OF = {
    kinds.FORWARD_SEND: kinds.FORWARD, kinds.FORWARD_RECV: kinds.FORWARD,
    kinds.BACKWARD_SEND: kinds.BACKWARD, kinds.BACKWARD_RECV: kinds.BACKWARD,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Columns of equal length; times in ns."""

    kind: Ints
    cell: Ints
    tp_rank: Ints
    start: Ints
    end: Ints
    sequence: Ints
    chunk: NDArray[Any]
    microbatch: NDArray[Any]
    span: Ints
    """Which of the spans it was made from; -1: none."""

    def where(self, chosen: NDArray[np.bool_] | Ints) -> Rows:
        return Rows(*(getattr(self, one.name)[chosen] for one in fields(self)))

    def of(self, *names: str) -> NDArray[np.bool_]:
        """Return which rows are of these kinds."""
        return np.isin(self.kind, [NUMBER_OF[name] for name in names])

    def and_also(self, *others: Rows) -> Rows:
        parts = (self, *others)
        return Rows(*(np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells of some steps: cell = (dp_rank * pp_size + stage) * steps + place of the step."""

    layout: Layout
    steps: NDArray[Any]
    num_chunks: int

    @property
    def num_pipelines(self) -> int:
        return self.layout.dp_size * self.layout.pp_size

    @property
    def num_cells(self) -> int:
        return self.num_pipelines * len(self.steps)

    def of_ranks(self, rank: NDArray[Any], step: NDArray[Any]) -> Ints:
        """Return the cells of ranks' steps; the steps must be known."""
        group = rank.astype(np.int64) // self.layout.tp_size
        stage, dp_rank = group // self.layout.dp_size, group % self.layout.dp_size
        return (dp_rank * self.layout.pp_size + stage) * len(self.steps) + np.searchsorted(self.steps, step)

    def places(self, cell: Ints) -> tuple[Ints, Ints, Ints]:
        """Return data-parallel rank, stage and place of the step."""
        pipeline, step = np.divmod(cell, len(self.steps))
        dp_rank, stage = np.divmod(pipeline, self.layout.pp_size)
        return dp_rank, stage, step

    def latest(self, cell: Ints, times: Ints, chosen: NDArray[np.bool_]) -> Ints:
        """Return the latest of the chosen times, by cell; 0 where there is none."""
        found = np.zeros(self.num_cells, dtype=np.int64)
        np.maximum.at(found, cell[chosen], times[chosen])
        return found

    def numbered(self, rows: Rows) -> Rows:
        """Number the operations of a kind within each tp rank's cell: by start, messages as their computes.

        A message whose compute is not there has no number and is left out.
        """
        order = np.lexsort((rows.start, rows.kind, rows.tp_rank, rows.cell))
        rows = rows.where(order)
        line = (rows.cell * self.layout.tp_size + rows.tp_rank) * len(KINDS) + rows.kind
        places = np.arange(len(line))
        is_first = np.ones(len(line), dtype=bool)
        is_first[1:] = np.diff(line) != 0
        sequence = places - np.maximum.accumulate(np.where(is_first, places, 0))
        is_message = rows.of(*kinds.MESSAGES)
        is_compute = rows.of(*kinds.COMPUTES)
        number_of_compute = np.full(len(KINDS), -1, dtype=np.int64)
        for message, compute in _COMPUTE_OF.items():
            number_of_compute[NUMBER_OF[message]] = NUMBER_OF[compute]
        kind = np.where(is_message, number_of_compute[rows.kind], rows.kind)
        identity = self._identity(rows, kind)
        known, first = np.unique(identity[is_compute], return_index=True)
        at = np.searchsorted(known, identity[is_message])
        is_known = np.zeros(len(line), dtype=bool)
        if len(known):
            at = np.minimum(at, len(known) - 1)
            is_known[is_message] = known[at] == identity[is_message]
            sequence[is_message] = sequence[is_compute][first][at]
        numbered = replace(rows, sequence=sequence)
        return numbered.where(~is_message | is_known)

    def _identity(self, rows: Rows, kind: Ints) -> Ints:
        """Return a number for (cell, tensor-parallel rank, kind, chunk, micro-batch)."""
        line = (rows.cell * self.layout.tp_size + rows.tp_rank) * len(KINDS) + kind
        num_microbatches = int(rows.microbatch.max(initial=0)) + 1
        num_chunks = int(rows.chunk.max(initial=0)) + 1
        identity: Ints = (line * num_chunks + rows.chunk) * num_microbatches + rows.microbatch
        return identity
