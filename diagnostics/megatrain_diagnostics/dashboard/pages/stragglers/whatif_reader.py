"""What-if figures of the newest steps recorded in full: replayed once for all who ask, a bounded part of them."""

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
from megatrain_diagnostics.store.full_steps import full_steps_told, num_spans_told
from megatrain_diagnostics.store.reader import StoredEvents

MOST_OPERATIONS = 2_000_000
"""Of one replay: three seconds, half a gigabyte."""
_MOST_SPANS = 4_000_000
"""That are read for it: tensor-parallel ranks have spans of their own, and are one in a replay."""
_MOST_STEPS = 50
_MOST_KNOWN = 4
_CLOCKS_NS = 6 * 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Replayed:
    """A result, and what was left out of it."""

    result: WhatIf
    notes: tuple[str, ...]


class WhatIfReader:
    """For any threads: whoever asks while a replay is made waits for it."""

    def __init__(self, events: StoredEvents, *, most_operations: int = MOST_OPERATIONS) -> None:
        self._events, self._most_operations = events, most_operations
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int, int], Replayed] = {}

    def replayed(self, roster: Roster, first: int | None, last: int | None, job: str) -> Replayed:
        """Return the figures of the newest steps within the bounds. Raises: DataError where none was recorded."""
        with self._lock:
            begin, end, notes = self._steps(roster, first, last)
            key = (roster.round, begin, end)
            if key not in self._known:
                while len(self._known) >= _MOST_KNOWN:
                    del self._known[next(iter(self._known))]
                self._known[key] = Replayed(self._replay(roster, begin, end, job), notes)
            return self._known[key]

    def _steps(self, roster: Roster, first: int | None, last: int | None) -> tuple[int, int, tuple[str, ...]]:
        """Return the first and last step that are replayed."""
        told = full_steps_told(self._events, roster.round)
        # while a step is on its way some of its ranks are missing
        num_ranks = max((one.num_ranks for one in told), default=0)
        full = [
            one.step for one in told
            if (first or 0) <= one.step and (last is None or one.step <= last) and one.num_ranks == num_ranks
        ]  # fmt: skip
        if not full:
            shown = ", ".join(str(one.step) for one in told[-12:]) or "none"
            raise DataError(
                f"round {roster.round}: no step was recorded in full{_bounds_text(first, last)}; there are "
                f"{shown}. One in diagnostics.sample_period is, and all are for a while after `megatrain diag set`"
            )
        chosen: list[int] = []
        num_spans = 0
        for step in reversed(full[-_MOST_STEPS:]):
            where = Where((roster.round,), step, step, operations=SPAN_OPERATIONS)
            num_spans += num_spans_told(self._events, where)
            most = min(_MOST_SPANS, self._most_operations * roster.layout.stride("dp"))
            if chosen and num_spans > most:
                break
            chosen.append(step)
        notes: tuple[str, ...] = ()
        if len(chosen) < len(full):
            notes = (f"the newest {len(chosen)} of {len(full)} steps that were recorded in full are replayed",)
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
    """Return the hours around some spans: of all the comparisons of clocks in a week these are of use."""
    if not len(spans.start_ns):
        return Where()
    return Where(first_ns=int(spans.start_ns.min()) - _CLOCKS_NS, last_ns=int(spans.start_ns.max()) + _CLOCKS_NS)
