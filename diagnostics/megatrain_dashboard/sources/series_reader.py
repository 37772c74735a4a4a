"""Reads new steps of a run into a SeriesBuilder: the numbers of a few ranks, each row once, in small parts.

All ranks of a job have the same loss and end a step together, so eight of them represent all, and a step is used
when two of these have reported it. A job of a million steps is read over many polls, and the steps that are read so far
are shown.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatrain.contracts.black_box.operations import Operation
from megatrain_dashboard.sources.series_builder import SeriesBuilder
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import StepTotals, Values, num_rows
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.rounds_and_hosts import RoundSeen, steps_ahead

_STEPS_AT_ONCE = 4096
_NUM_PROBES = 8
_MAX_READ_S = 0.5


class SeriesReader:
    """Reads into `builder`, in one thread. `within`: the first and last step that are read; None: all."""

    def __init__(
        self,
        events: StoredEvents,
        builder: SeriesBuilder,
        *,
        steps_at_once: int = _STEPS_AT_ONCE,
        within: tuple[int, int] | None = None,
    ) -> None:
        self._events, self._builder, self._steps_at_once = events, builder, steps_at_once
        self._first = 0 if within is None else within[0]
        self._last = None if within is None else within[1]
        self._probes: tuple[int, ...] = ()
        self._number = -1

    def poll(self, seen: Sequence[RoundSeen], *, is_over: bool = False) -> bool:
        """Read new steps for at most half a second; return whether more can be read at once.

        `is_over`: the job is over, so missing rows will not arrive any more. Raises: DataError.
        """
        known = [round_ for round_ in seen if round_.is_confirmed]
        until_s = time.monotonic() + _MAX_READ_S
        while known and time.monotonic() < until_s:
            if self._number < known[0].number:
                self._begin(known[0])
            later = [round_ for round_ in known if round_.number > self._number]
            if self._take(is_last=bool(later) or is_over):
                continue
            if not later:
                return False
            self._begin(later[0])
        return bool(known)

    def _begin(self, seen: RoundSeen) -> None:
        self._number = seen.number
        stride = max(1, seen.world_size // _NUM_PROBES)
        self._probes = tuple(range(0, max(1, seen.world_size), stride))[:_NUM_PROBES]
        self._builder.begin(seen.number, len(self._probes), self._first)

    def _take(self, *, is_last: bool) -> bool:
        """Enter some steps; return whether there were any."""
        first = self._builder.next_step
        if self._last is not None and first > self._last:
            return False
        last = first + self._steps_at_once - 1
        last = last if self._last is None else min(last, self._last)
        where = Where((self._number,), first, last, self._probes)
        values = self._events.read(Values, where)
        of_step = Where(where.rounds, where.first_step, where.last_step, where.ranks, (Operation.STEP.number,))
        totals = self._events.read(StepTotals, of_step)
        if num_rows(values) or num_rows(totals):
            return self._builder.take(values, totals, is_last=is_last) > 0
        ahead = steps_ahead(self._events, Values, Where((self._number,), first, self._last, self._probes))
        # a step that only one rank reports is an error of that rank
        if ahead is None or ahead.num_ranks < min(2, len(self._probes)) or ahead.first <= first:
            return False
        self._builder.skip_to(ahead.first)
        return True
