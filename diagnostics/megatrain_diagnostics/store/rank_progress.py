"""The progress of each rank: its newest reported step, and the operation that it began last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain.contracts.black_box.operations import OF_DATA_LOADER, Operation
from megatrain_diagnostics.columns.schema import NOT_KNOWN, names_of
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Int8, Int32, Spans, StepTotals
from megatrain_diagnostics.store.full_steps import stored_full_steps
from megatrain_diagnostics.store.reader import StoredEvents, sql_conditions
from megatrain_diagnostics.store.step_cells import newest_stored_steps

_NUM_STEPS = 200
"""Number of newest steps to search; a rank that reported none of them is silent."""


@dataclass(frozen=True, slots=True, eq=False)
class ProgressByRank:
    """Progress of all ranks. Shapes: all [ranks]."""

    step: Int32
    """Newest completed step; -1: the rank reported none of the newest 200 steps."""
    operation: Int8
    """Number of the operation that the rank began last; 0: not known."""


def rank_progress(events: StoredEvents, round_number: int, num_ranks: int) -> ProgressByRank:
    """Return the progress of the ranks. Raises: DataError."""
    return ProgressByRank(
        _newest_steps(events, round_number, num_ranks), _last_operations(events, round_number, num_ranks)
    )


def _newest_steps(events: StoredEvents, round_number: int, num_ranks: int) -> Int32:
    steps = np.full(num_ranks, -1, dtype=np.int32)
    newest = newest_stored_steps(events, round_number, _NUM_STEPS)
    if not len(newest):
        return steps
    where = Where((round_number,), int(newest[0]), int(newest[-1]))
    conditions, values = sql_conditions(StepTotals, where)
    sql = f"SELECT rank, max(step) AS step FROM segments WHERE {conditions} GROUP BY rank"
    table = events.query(StepTotals, where, sql, values)
    if table is not None:
        rank, step = (table.column(name).to_numpy() for name in ("rank", "step"))
        is_known = (rank >= 0) & (rank < num_ranks)
        steps[rank[is_known]] = step[is_known]
    return steps


def _last_operations(events: StoredEvents, round_number: int, num_ranks: int) -> Int8:
    operations = np.full(num_ranks, NOT_KNOWN, dtype=np.uint8)
    full = stored_full_steps(events, round_number)
    if not full:
        return operations
    # a step that has begun but not ended is not in `full`; its open spans are found too, because its number is larger
    where = Where((round_number,), full[-1].step)
    conditions, values = sql_conditions(Spans, where)
    # neither the span of the whole step nor those of the data loader show what the rank is doing
    ignored = ", ".join(f"'{operation.value}'" for operation in (Operation.STEP, *OF_DATA_LOADER))
    conditions += f" AND operation NOT IN ({ignored})"
    sql = f"SELECT rank, arg_max(operation, sequence) AS operation FROM segments WHERE {conditions} GROUP BY rank"
    table = events.query(Spans, where, sql, values)
    names = names_of("operation")
    assert names is not None
    number_of = {name: number for number, name in enumerate(names)}
    if table is not None:
        rows = zip(table.column("rank").to_pylist(), table.column("operation").to_pylist(), strict=True)
        for rank, name in rows:
            if 0 <= rank < num_ranks:
                operations[rank] = number_of.get(name, NOT_KNOWN)
    return operations
