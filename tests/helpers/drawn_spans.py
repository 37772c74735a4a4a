"""Events that a test defines: spans in microseconds on the tracks of a few ranks, and those of a whole job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.events.roster import axis_values
from megatrain_diagnostics.events.tables import (
    Groups,
    Ranks,
    Spans,
    StepTotals,
    Table,
    Values,
    columns_of,
    from_columns,
)
from tests.helpers.memory_events import MemoryEvents

BASE_NS = 1_700_000_000_000_000_000
"""A unix time with digits that float arithmetic would lose."""


@dataclass
class Drawing:
    """Rows of a job's tables, in the order in which they were added."""

    layout: Layout = field(default_factory=Layout)
    ranks_a_host: int = 2
    rows: dict[type[Table], list[dict[str, Any]]] = field(default_factory=dict)
    groups: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)

    def _add(self, table: type[Table], **columns: Any) -> None:
        rows = self.rows.setdefault(table, [])
        rows.append({"round": 1, "sequence": len(rows) + 1, **columns})

    def group(self, name: str, members: Sequence[int]) -> int:
        """Return the number of a group, the same for all of its members."""
        key = (name, tuple(members))
        if key not in self.groups:
            self.groups[key] = len(self.groups) + 1
            stride = members[1] - members[0] if len(members) > 1 else 1
            for rank in members:
                self._add(Groups, rank=rank, group=self.groups[key], first_rank=members[0], stride=stride,
                          num_ranks=len(members), name=name)  # fmt: skip
        return self.groups[key]

    def span(self, operation: Operation, start_us: float, length_us: float | None, **more: Any) -> None:
        """Add a span; with None us it is open."""
        start_ns = BASE_NS + round(start_us * 1000)
        row = {"rank": 0, "step": 1, "microbatch": -1, "chunk": -1, "group": 0, "collective": 0, "num_bytes": 0,
               "flags": 0, "launch_ns": start_ns, **more}  # fmt: skip
        duration_ns = -1 if length_us is None else round(length_us * 1000)
        self._add(Spans, operation=operation.number, start_ns=start_ns, duration_ns=duration_ns, **row)

    def total(self, operation: Operation, start_us: float, sum_us: float, **more: Any) -> None:
        row = {"rank": 0, "step": 1, "count": 1, "num_bytes": 0, **more}
        sum_ns = round(sum_us * 1000)
        self._add(StepTotals, operation=operation.number, start_ns=BASE_NS + round(start_us * 1000), sum_ns=sum_ns,
                  max_ns=sum_ns, **row)  # fmt: skip

    def value(self, kind: int, at_us: float, value: float, **more: Any) -> None:
        self._add(Values, kind=kind, at_ns=BASE_NS + round(at_us * 1000), value=value, **{"rank": 0, "step": 1, **more})

    def tables(self) -> dict[type[Table], Table]:
        """Return all tables; the table of ranks has every rank of the layout."""
        if Ranks not in self.rows:
            for rank in range(self.layout.world_size):
                self._add(Ranks, rank=rank, **axis_values(self.layout, rank), pid=100 + rank, at_ns=BASE_NS,
                          host=f"host-{rank // self.ranks_a_host}", branch="main")  # fmt: skip
        return {kind: _table(kind, rows) for kind, rows in self.rows.items()}

    def source(self) -> MemoryEvents:
        return MemoryEvents(self.tables())


def _table(kind: type[Table], rows: list[dict[str, Any]]) -> Table:
    table: Table = from_columns(kind, {name: [row[name] for row in rows] for name in columns_of(kind)})
    return table


def draw_job(layout: Layout, steps: Sequence[int], num_microbatches: int) -> Drawing:
    """Add whole steps of every rank: data, forwards and backwards with links and tp sums, scatter, clip, optimizer.

    A stage begins a micro-batch when the previous stage has sent it. The times are invented but possible.
    """
    drawing, random = Drawing(layout=layout, ranks_a_host=8), np.random.default_rng(0)
    places: dict[tuple[int, int], int] = {}

    def next_place(rank: int, group: int) -> int:
        places[rank, group] = places.get((rank, group), 0) + 1
        return places[rank, group]

    for step in steps:
        begin_us = step * 100_000.0
        ready: dict[tuple[int, int], float] = {}
        free = dict.fromkeys(range(layout.world_size), begin_us + 50.0)
        for rank in range(layout.world_size):
            drawing.total(Operation.STEP, begin_us, 90_000.0, rank=rank, step=step)
            drawing.span(Operation.DATA_WAIT, begin_us, 40.0, rank=rank, step=step)
        for micro in range(num_microbatches):
            for rank in range(layout.world_size):
                _forward(drawing, layout, rank, step, micro, ready, free, random, next_place)
        for rank in range(layout.world_size):
            members = layout.ranks_along(rank, "dp")
            scatter = drawing.group("dp", members)
            end = max(free[member] for member in members) + 500.0
            drawing.span(Operation.GRADS_REDUCE_SCATTER, free[rank], end - free[rank], rank=rank, step=step,
                         group=scatter, collective=next_place(rank, scatter), num_bytes=4_000_000)  # fmt: skip
            drawing.span(Operation.OPTIMIZER, end, 100.0, rank=rank, step=step)
            drawing.span(Operation.STEP, begin_us + 45.0, end + 110.0 - begin_us - 45.0, rank=rank, step=step)
    return drawing


def _forward(drawing: Drawing, layout: Layout, rank: int, step: int, micro: int, ready: dict[tuple[int, int], float],
             free: dict[int, float], random: np.random.Generator, next_place: Any) -> None:  # fmt: skip
    chain = layout.ranks_along(rank, "pp")
    stage = chain.index(rank)
    begin = free[rank]
    if stage:
        link = drawing.group("pp-forward", (chain[stage - 1], rank))
        arrived = max(begin + 1.0, ready[chain[stage - 1], micro] + 20.0)
        drawing.span(Operation.FORWARD_RECV, begin, arrived - begin, rank=rank, step=step, microbatch=micro, chunk=0,
                     group=link, collective=next_place(rank, link), num_bytes=1_000_000)  # fmt: skip
        begin = arrived
    work = float(random.integers(800, 1200))
    drawing.span(Operation.FORWARD_COMPUTE, begin, work, rank=rank, step=step, microbatch=micro, chunk=0)
    drawing.span(Operation.BACKWARD_COMPUTE, begin + work, work, rank=rank, step=step, microbatch=micro, chunk=0)
    if layout.tp_size > 1:
        tp = drawing.group("tp", layout.ranks_along(rank, "tp"))
        drawing.span(Operation.TP_ALL_GATHER, begin + 100.0, 50.0, rank=rank, step=step, group=tp,
                     collective=next_place(rank, tp), num_bytes=100_000)  # fmt: skip
    end = begin + 2 * work
    if stage + 1 < len(chain):
        link = drawing.group("pp-forward", (rank, chain[stage + 1]))
        drawing.span(Operation.FORWARD_SEND, end, 30.0, rank=rank, step=step, microbatch=micro, chunk=0, group=link,
                     collective=next_place(rank, link), num_bytes=1_000_000)  # fmt: skip
    ready[rank, micro] = end
    free[rank] = end + 5.0
