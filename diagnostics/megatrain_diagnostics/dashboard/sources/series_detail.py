"""A part of the series step by step, where the book of the whole run has put steps together: read from the store anew.

The book keeps the newest thousands of steps as they are, and older ones ever more coarsely. Whoever looks at fifteen
minutes of a week ago shall see each step of them: so a part of at most 16,384 steps is read into a book of its own,
2 MB, and the newest few are kept. Where the store has forgotten these steps, the coarse entries stand.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.dashboard.sources.series_book import CAPACITY, SeriesBook, SeriesSnapshot
from megatrain_diagnostics.dashboard.sources.series_reader import SeriesReader
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.rounds import RoundSeen

MOST_STEPS = CAPACITY
_NUM_KEPT = 4
_BUDGET_S = 10.0

_Key = tuple[tuple[int, int, int], ...]


class SeriesDetail:
    """For any threads."""

    def __init__(self, events: StoredEvents, *, budget_s: float = _BUDGET_S) -> None:
        self._events, self._budget_s = events, budget_s
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, SeriesSnapshot] = OrderedDict()

    def part(self, whole: SeriesSnapshot, rounds: Sequence[RoundSeen], first: int, last: int) -> SeriesSnapshot:
        """Return the steps from `first` to `last`, each by itself where that can be; else as `whole` has them."""
        coarse = whole.between(first, last)
        if not len(coarse) or not _is_coarse(coarse):
            return coarse
        first, last = max(first, int(coarse.column("first")[0])), min(last, int(coarse.column("last")[-1]))
        if last - first >= MOST_STEPS:
            return coarse
        # a step belongs to the newest round that did it: rows of older rounds for it no longer count
        reached = tuple(
            (number, max(begin, first), min(end, last))
            for number, begin, end in whole.reached
            if begin <= last and end >= first
        )
        with self._lock:  # whoever asks meanwhile waits, and finds it kept
            found = self._kept.pop(reached, None)
            if found is None:
                numbers = {number for number, _, _ in reached}
                try:
                    found = self._read([one for one in rounds if one.number in numbers], first, last)
                except DataError:
                    return coarse  # whoever looks at the run directory tells what is wrong with it
            self._kept[reached] = found
            while len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        return found if len(found) > len(coarse) else coarse

    def _read(self, rounds: Sequence[RoundSeen], first: int, last: int) -> SeriesSnapshot:
        book = SeriesBook()
        reader = SeriesReader(self._events, book, within=(first, last))
        until_s = time.monotonic() + self._budget_s
        while reader.look(rounds, is_over=True) and time.monotonic() < until_s:
            pass
        return book.snapshot().between(first, last)


def _is_coarse(series: SeriesSnapshot) -> bool:
    return bool((series.column("last") > series.column("first")).any())
