"""A part of the series step by step, read again from the store where the series of the whole run has merged steps.

That series has the newest thousands of steps exactly, and older ones ever more coarsely. A person who looks at fifteen
minutes of last week must still see each step. So a part of at most 16,384 steps is read into a series of 2 MB by
itself, and the few newest of these are cached. Where the store no longer has these steps, the coarse entries are used.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from megatrain.contracts.errors import DataError
from megatrain_dashboard.sources.series_builder import CAPACITY, SeriesBuilder, SeriesSnapshot
from megatrain_dashboard.sources.series_reader import SeriesReader
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.rounds_and_hosts import RoundSeen

MAX_STEPS = CAPACITY
_NUM_KEPT = 4
_BUDGET_S = 10.0

_Key = tuple[tuple[int, int, int], ...]


class SeriesDetail:
    """Thread-safe."""

    def __init__(self, events: StoredEvents) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, SeriesSnapshot] = OrderedDict()

    def part(self, whole: SeriesSnapshot, rounds: Sequence[RoundSeen], first: int, last: int) -> SeriesSnapshot:
        """Return the steps from `first` to `last`, one entry each where possible; else the entries of `whole`."""
        coarse = whole.between(first, last)
        if not len(coarse) or not _is_coarse(coarse):
            return coarse
        first, last = max(first, int(coarse.column("first")[0])), min(last, int(coarse.column("last")[-1]))
        if last - first >= MAX_STEPS:
            return coarse
        # a step belongs to the newest round that did it: rows of older rounds for it no longer count
        reached = tuple(
            (number, max(begin, first), min(end, last))
            for number, begin, end in whole.reached
            if begin <= last and end >= first
        )
        with self._lock:  # other requests wait, and then find the part cached
            found = self._kept.pop(reached, None)
            if found is None:
                numbers = {number for number, _, _ in reached}
                try:
                    found = self._read([one for one in rounds if one.number in numbers], first, last)
                except DataError:
                    return coarse  # the reader of the run directory reports the error
            self._kept[reached] = found
            while len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        return found if len(found) > len(coarse) else coarse

    def _read(self, rounds: Sequence[RoundSeen], first: int, last: int) -> SeriesSnapshot:
        builder = SeriesBuilder()
        reader = SeriesReader(self._events, builder, within=(first, last))
        until_s = time.monotonic() + _BUDGET_S
        while reader.poll(rounds, is_over=True) and time.monotonic() < until_s:
            pass
        return builder.snapshot().between(first, last)


def _is_coarse(series: SeriesSnapshot) -> bool:
    return bool((series.column("last") > series.column("first")).any())
