"""A part of the series step by step, read again from the store where the series of the whole run has merged steps.

The series of the whole run has one entry for each of the newest thousands of steps, and merged entries for older ones.
A chart of fifteen minutes of last week must still show each step. So a part of at most 16,384 steps is read into a
series of its own, of at most 2 MB. The four parts that were used last are cached. Where the store no longer has the
steps, the merged entries are used.
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
    """Reads and caches the parts. Thread-safe."""

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
        # a step belongs to the newest round that trained it: the rows that older rounds have for this step do not count
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
                    found = self._read([round_ for round_ in rounds if round_.number in numbers], first, last)
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
