"""Queries a value of each rank in each step, as a matrix for the heat map, and which steps exist."""

from __future__ import annotations

from typing import Literal

import numpy as np

from megatrain.contracts.black_box.operations import Operation
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Float64, Int64, StepTotals
from megatrain_diagnostics.store.reader import StoredEvents, sql_conditions

Aggregate = Literal["sum_ns", "max_ns", "count", "num_bytes"]


def step_cells(
    events: StoredEvents, round_number: int, operation: int, aggregate: Aggregate, steps: range, num_ranks: int
) -> Float64:
    """Return ns, spans or bytes of an operation. Shape: [steps, ranks]; NaN: no row. Of several rows: the maximum.

    Raises: DataError.
    """
    if not steps:
        return np.zeros((0, num_ranks))
    where = Where((round_number,), steps[0], steps[-1], operations=(operation,))
    conditions, values = sql_conditions(StepTotals, where)
    conditions += f" AND rank BETWEEN 0 AND {num_ranks - 1}"
    sql = f"SELECT rank, step, {aggregate} AS value FROM segments WHERE {conditions}"
    cells = np.full(len(steps) * num_ranks, np.nan)
    found = events.query(StepTotals, where, sql, values)
    if found is not None and found.num_rows:
        rank, step, value = (found.column(name).to_numpy() for name in ("rank", "step", "value"))
        place = (step.astype(np.int64) - steps[0]) * num_ranks + rank
        cells[place] = value
        is_less = cells[place] < value  # True if a cell has several different rows: the result must be their maximum
        if is_less.any():
            np.fmax.at(cells, place[is_less], value[is_less].astype(np.float64))
    return cells.reshape(len(steps), num_ranks)


def newest_stored_steps(
    events: StoredEvents, round_number: int, most: int, first: int | None = None, last: int | None = None
) -> Int64:
    """Return the newest steps with sums, ascending, at most `most`, from `first` to `last`.

    If several ranks report some steps, steps that only one rank reports are dropped as an error of that rank.
    Raises: DataError.
    """
    bounds = events.step_bounds(StepTotals, Where((round_number,)))
    if bounds is None:
        return np.zeros(0, dtype=np.int64)
    least = 0 if first is None else first
    newest = bounds[1] if last is None else min(bounds[1], last)
    lonely = np.zeros(0, dtype=np.int64)
    for begin in dict.fromkeys((max(least, newest - most + 1), least)):
        # the bounds in the footers may include wrong step numbers or another round; the second pass searches all steps
        for operations in ((Operation.STEP.number,), (Operation.FORWARD_COMPUTE.number,), None):
            found, is_shared = _query_steps(events, Where((round_number,), begin, newest, operations=operations))
            if is_shared and begin > least and found[-1] < newest:
                # later steps in the footers belong to another round: search `most` steps up to the last one found
                begin, newest = max(least, int(found[-1]) - most + 1), int(found[-1])
                found, _ = _query_steps(events, Where((round_number,), begin, newest, operations=operations))
            if is_shared:
                return found[-most:]
            lonely = found if len(found) else lonely
    return lonely[-most:]


def _query_steps(events: StoredEvents, where: Where) -> tuple[Int64, bool]:
    """Return the steps that several ranks report and True; if there are none, all steps and False."""
    conditions, values = sql_conditions(StepTotals, where)
    sql = f"SELECT step, min(rank) < max(rank) AS is_shared FROM segments WHERE {conditions} GROUP BY step"
    table = events.query(StepTotals, where, sql, values)
    if table is None or not table.num_rows:
        return np.zeros(0, dtype=np.int64), False
    steps = table.column("step").to_numpy().astype(np.int64)
    is_shared = np.array(table.column("is_shared").to_pylist(), dtype=bool)
    return np.sort(steps[is_shared] if is_shared.any() else steps), bool(is_shared.any())
