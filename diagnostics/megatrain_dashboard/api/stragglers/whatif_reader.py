"""What-if figures of the newest fully recorded steps. A bounded number of steps is replayed, once for all requests."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.analysis.whatif import WhatIf, make_model, what_if
from megatrain_diagnostics.analysis.whatif.from_spans import SPAN_OPERATIONS, operations_of
from megatrain_diagnostics.events.clocks import align
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Clocks, Spans
from megatrain_diagnostics.store.full_steps import num_stored_spans, stored_full_steps
from megatrain_diagnostics.store.reader import StoredEvents

MAX_OPERATIONS = 2_000_000
"""Limit of the operations of one replay, which then takes three seconds and half a gigabyte."""
_MAX_SPANS = 4_000_000
"""Limit of the spans that are read for one replay, in which the spans of all tensor-parallel ranks become one."""
_MAX_STEPS = 50
_MAX_KNOWN = 4
_CLOCKS_NS = 6 * 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Replayed:
    """A result, and notes on what it leaves out."""

    result: WhatIf
    notes: tuple[str, ...]


class WhatIfReader:
    """Replays steps, and keeps the newest results. Thread-safe: a request that comes during a replay waits for it."""

    def __init__(self, events: StoredEvents, *, most_operations: int = MAX_OPERATIONS) -> None:
        self._events, self._most_operations = events, most_operations
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int, int], Replayed] = {}

    def replayed(self, roster: Roster, first: int | None, last: int | None, job: str) -> Replayed:
        """Return the figures of the newest steps within the bounds. Raises: DataError where none was recorded."""
        with self._lock:
            begin, end, notes = self._steps(roster, first, last)
            key = (roster.round, begin, end)
            if key not in self._known:
                while len(self._known) >= _MAX_KNOWN:
                    del self._known[next(iter(self._known))]
                self._known[key] = Replayed(self._replay(roster, begin, end, job), notes)
            return self._known[key]

    def _steps(self, roster: Roster, first: int | None, last: int | None) -> tuple[int, int, tuple[str, ...]]:
        """Return the first and last step that are replayed, and notes on steps that are left out."""
        stored = stored_full_steps(self._events, roster.round)
        # while events of a step are arriving, some of its ranks are missing
        num_ranks = max((full_step.num_ranks for full_step in stored), default=0)
        full = [
            full_step.step for full_step in stored
            if (first or 0) <= full_step.step
            and (last is None or full_step.step <= last) and full_step.num_ranks == num_ranks
        ]  # fmt: skip
        if not full:
            shown = ", ".join(str(full_step.step) for full_step in stored[-12:]) or "none"
            raise DataError(
                f"round {roster.round}: no step was recorded in full by all ranks{_bounds_text(first, last)}; steps "
                f"that some ranks recorded: {shown}. Only one step in diagnostics.sample_period is recorded in full; "
                "`megatrain diag set` records all steps for a time"
            )
        chosen: list[int] = []
        num_spans = 0
        for step in reversed(full[-_MAX_STEPS:]):
            where = Where((roster.round,), step, step, operations=SPAN_OPERATIONS)
            num_spans += num_stored_spans(self._events, where)
            most = min(_MAX_SPANS, self._most_operations * roster.layout.stride("dp"))
            if chosen and num_spans > most:
                break
            chosen.append(step)
        notes: tuple[str, ...] = ()
        if len(chosen) < len(full):
            notes = (f"only the newest {len(chosen)} of {len(full)} fully recorded steps are replayed",)
        return chosen[-1], chosen[0], notes

    def _replay(self, roster: Roster, first: int, last: int, job: str) -> WhatIf:
        spans = self._events.read(Spans, Where((roster.round,), first, last, operations=SPAN_OPERATIONS))
        clocks = self._events.read(Clocks, _around(spans))
        spans = align(spans, clocks, roster.hosts)
        operations, shape = operations_of(spans, roster, job)
        return what_if(make_model(operations, shape))


def _bounds_text(first: int | None, last: int | None) -> str:
    if first is None and last is None:
        return ""
    return f" from step {first or 0} to {'the newest' if last is None else last}"


def _around(spans: Spans) -> Where:
    """Return the hours around some spans: only the clock comparisons in these hours are used."""
    if not len(spans.start_ns):
        return Where()
    return Where(first_ns=int(spans.start_ns.min()) - _CLOCKS_NS, last_ns=int(spans.start_ns.max()) + _CLOCKS_NS)
