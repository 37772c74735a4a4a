"""Which steps were recorded span by span, and how much of them there is, without reading the spans."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.contracts.operations import Operation
from megatrain_diagnostics.analysis.step_windows import PROVES_FULL
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Spans
from megatrain_diagnostics.store.reader import StoredEvents, sql_conditions

_NEWEST = 5000
"""Steps that are looked at: the spans of older ones are hardly ever kept that long."""


@dataclass(frozen=True, slots=True)
class FullStep:
    """One step. Times: unix ns by the hosts' own clocks."""

    step: int
    num_ranks: int
    """That recorded all of their spans."""
    begin_ns: int
    end_ns: int


def full_steps_told(events: StoredEvents, round_number: int) -> tuple[FullStep, ...]:
    """Return the newest steps that ranks recorded in full, ascending.

    A number that one rank alone tells of, where others tell of other steps, is nonsense of that rank.
    Raises: DataError.
    """
    bounds = events.bounds(Spans, Where((round_number,)), "step")
    if bounds is None:
        return ()
    for first in dict.fromkeys((max(0, bounds[1] - _NEWEST), 0)):
        # nearly always the span around the step is there, which is one row a rank and not hundreds
        for operations in ((Operation.STEP,), PROVES_FULL):
            found = _told(events, Where((round_number,), first, operations=tuple(one.number for one in operations)))
            if found:
                return found[-_NEWEST:]
    return ()


def _told(events: StoredEvents, where: Where) -> tuple[FullStep, ...]:
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


def num_spans_told(events: StoredEvents, where: Where) -> int:
    """Return how many spans there are. Raises: DataError."""
    conditions, values = sql_conditions(Spans, where)
    table = events.query(Spans, where, f"SELECT count(*) AS spans FROM segments WHERE {conditions}", values)
    return 0 if table is None else int(table.column("spans")[0].as_py())
