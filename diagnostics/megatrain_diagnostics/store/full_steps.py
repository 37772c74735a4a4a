"""Finds the steps that ranks recorded in full, and counts stored spans, by aggregation in SQL."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.contracts.black_box.operations import Operation
from megatrain_diagnostics.analysis.step_windows import OPERATIONS_OF_FULL_STEPS
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Spans
from megatrain_diagnostics.store.reader import StoredEvents, sql_conditions

_NEWEST = 5000
"""Largest number of steps to return. The newest 5,000 steps are searched first: older spans are rarely kept."""


@dataclass(frozen=True, slots=True)
class FullStep:
    """A step that some ranks recorded in full, with all spans. Times are unix ns by the hosts' clocks."""

    step: int
    num_ranks: int
    """Number of ranks that recorded all spans of the step."""
    begin_ns: int
    end_ns: int


def stored_full_steps(events: StoredEvents, round_number: int) -> tuple[FullStep, ...]:
    """Return the newest steps that ranks recorded in full, ascending.

    If several ranks report some steps, steps that only one rank reports are dropped as an error of that rank.
    Raises: DataError.
    """
    bounds = events.step_bounds(Spans, Where((round_number,)))
    if bounds is None:
        return ()
    for first in dict.fromkeys((max(0, bounds[1] - _NEWEST), 0)):
        # first try the span of the whole step, which is nearly always stored: one row per rank instead of hundreds
        for operations in ((Operation.STEP,), OPERATIONS_OF_FULL_STEPS):
            found = _query_full_steps(
                events, Where((round_number,), first, operations=tuple(operation.number for operation in operations))
            )
            if found:
                return found[-_NEWEST:]
    return ()


def _query_full_steps(events: StoredEvents, where: Where) -> tuple[FullStep, ...]:
    conditions, values = sql_conditions(Spans, where)
    sql = (
        "SELECT step, count(DISTINCT rank) AS ranks, min(start_ns) AS begin_ns, max(start_ns + duration_ns) AS end_ns"
        f" FROM segments WHERE {conditions} AND duration_ns >= 0 GROUP BY step ORDER BY step"
    )
    table = events.query(Spans, where, sql, values)
    rows = [] if table is None else table.to_pylist()
    least = min(2, max((row["ranks"] for row in rows), default=0))
    return tuple(
        FullStep(row["step"], row["ranks"], row["begin_ns"], row["end_ns"]) for row in rows if row["ranks"] >= least
    )


def num_stored_spans(events: StoredEvents, where: Where) -> int:
    """Return the number of stored spans. Raises: DataError."""
    conditions, values = sql_conditions(Spans, where)
    table = events.query(Spans, where, f"SELECT count(*) AS spans FROM segments WHERE {conditions}", values)
    return 0 if table is None else int(table.column("spans")[0].as_py())
