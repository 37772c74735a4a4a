"""The heat map: ranks down, steps across, each cell the greatest value in it and whose that is.

The maximum and never the mean: one slow rank among 48 that share a line of the screen must stay as bright as it is
alone (MegaScale sec. 5.1 shows each machine's own time). Rows that were stored twice do not change a maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa

from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Int32, Int64, StepTotals

Aggregate = Literal["sum_ns", "max_ns", "count", "num_bytes"]
NOTHING = -1
"""In a cell of which nothing is known."""


@dataclass(frozen=True, slots=True)
class HeatQuestion:
    """What is shown of which ranks and steps, in how many lines and columns at most."""

    kind: ClassVar[type[StepTotals]] = StepTotals

    round: int
    operation: int
    """Its number."""
    ranks: range
    steps: range
    aggregate: Aggregate = "sum_ns"
    max_rank_bins: int = 256
    max_step_bins: int = 256

    def __post_init__(self) -> None:
        for name, numbers in (("ranks", self.ranks), ("steps", self.steps)):
            if not numbers or numbers.step != 1:
                raise ValueError(f"{name}={numbers}: expected a range that is not empty, without gaps")
        if min(self.max_rank_bins, self.max_step_bins) < 1:
            raise ValueError(f"{self.max_rank_bins} x {self.max_step_bins} bins: expected at least one of each")

    @property
    def ranks_per_bin(self) -> int:
        return -(-len(self.ranks) // self.max_rank_bins)

    @property
    def steps_per_bin(self) -> int:
        return -(-len(self.steps) // self.max_step_bins)

    @property
    def where(self) -> Where:
        return Where(
            rounds=(self.round,),
            operations=(self.operation,),
            first_step=self.steps[0],
            last_step=self.steps[-1],
        )


@dataclass(frozen=True, slots=True, eq=False)
class HeatMap:
    """Shapes: all arrays [rank bins, step bins]. A cell without a row holds NOTHING in all three."""

    question: HeatQuestion
    values: Int64
    """Of the question's aggregate: ns, spans or bytes."""
    at_rank: Int32
    at_step: Int32
    """Where the greatest value is; of several that are equal, any."""


def heat_sql(question: HeatQuestion, conditions: str) -> str:
    """Return the question as SQL over `segments`."""
    ranks, steps, value = question.ranks, question.steps, question.aggregate
    place = f"CAST(rank - {ranks[0]} AS BIGINT) * {len(steps)} + (step - {steps[0]})"
    return (
        f"SELECT {_bin('rank', ranks, question.ranks_per_bin)} AS rank_bin,"
        f" {_bin('step', steps, question.steps_per_bin)} AS step_bin,"
        f" max({value}) AS value, arg_max({place}, {value}) AS place"
        f" FROM segments WHERE {conditions} AND rank BETWEEN {ranks[0]} AND {ranks[-1]} GROUP BY 1, 2"
    )


def heat_map(question: HeatQuestion, found: pa.Table | None) -> HeatMap:
    """Return the cells of an answer; None: there were no rows."""
    ranks, steps = question.ranks, question.steps
    shape = (-(-len(ranks) // question.ranks_per_bin), -(-len(steps) // question.steps_per_bin))
    values = np.full(shape, NOTHING, dtype=np.int64)
    at_rank, at_step = (np.full(shape, NOTHING, dtype=np.int32) for _ in range(2))
    if found is not None and found.num_rows:
        rank_bin, step_bin, value, place = (found.column(name).to_numpy() for name in found.column_names)
        values[rank_bin, step_bin] = value
        at_rank[rank_bin, step_bin] = ranks[0] + place // len(steps)
        at_step[rank_bin, step_bin] = steps[0] + place % len(steps)
    return HeatMap(question=question, values=values, at_rank=at_rank, at_step=at_step)


def _bin(column: str, numbers: range, size: int) -> str:
    # no integer division: DuckDB writes //, ClickHouse intDiv
    offset = f"({column} - {numbers[0]})"
    return f"CAST(({offset} - {offset} % {size}) / {size} AS INTEGER)"
