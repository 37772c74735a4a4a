"""The cells of the heat map, read once for the picture, the outliers and the CSV, which a page requests in turn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np

from megatrain_dashboard.api.heat.subject import Subject
from megatrain_dashboard.api.heat.view import HeatCells
from megatrain_dashboard.responses.errors import TooMuchDataError
from megatrain_diagnostics.analysis.heat_scale import Floats
from megatrain_diagnostics.analysis.peers import Peers
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import StepTotals
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.step_cells import newest_stored_steps

MAX_RAW_CELLS = 24_000_000
"""The most ranks x steps of one request: 1,953 steps of 12,288 ranks, which take 0.6 GB of memory."""
_MAX_KEPT_CELLS = 2_600_000
"""Results with more cells are not cached: about 21 MB of values."""
_NUM_KEPT = 2
_MAX_DEFAULT_STEPS = 1000
_MAX_MISSING = 3
"""The number of newest steps whose sums may still be missing for most ranks."""


@dataclass(frozen=True, slots=True)
class HeatQuery:
    """Selects the cells of a subject. `version` grows when new events arrive, so that cached cells are not reused.

    `first` and `last`: the steps, both included; None: not given. `max_cells`: limit of ranks x steps if `first` is not
    given.
    """

    subject: Subject
    first: int | None
    last: int | None
    max_cells: int
    version: int
    from_step: int | None = None
    to_step: int | None = None
    """If `first` and `last` are not given: the newest steps between these bounds, as many as `max_cells` allows."""


class HeatCellReader:
    """Reads cells, and caches those of the newest pictures. Thread-safe."""

    def __init__(self, events: StoredEvents) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, HeatQuery], HeatCells] = OrderedDict()
        self._peers: tuple[Roster, Peers] | None = None

    def read(self, roster: Roster, query: HeatQuery) -> HeatCells:
        """Return the cells of the given steps; without given steps the newest ones, as many as `max_cells` allows.

        Raises: DataError; TooMuchDataError.
        """
        key = (roster.round, query)
        with self._lock:
            kept = self._kept.get(key)
        if kept is not None and kept.roster is roster:
            return kept
        cells = self._read(roster, query)
        if cells.values.size <= _MAX_KEPT_CELLS:
            with self._lock:
                self._kept[key] = cells
                self._kept.move_to_end(key)
                while len(self._kept) > _NUM_KEPT:
                    self._kept.popitem(last=False)
        return cells

    def read_around(self, roster: Roster, query: HeatQuery, first: int, last: int) -> HeatCells:
        """Return cells that include some steps: the cells of a cached picture, or else cells of these steps only.

        Raises: DataError; TooMuchDataError.
        """
        with self._lock:
            for (round_number, other), kept in self._kept.items():
                is_same = round_number == roster.round and other.version == query.version
                is_same &= other.subject == query.subject
                if is_same and kept.first_step <= first and last < kept.first_step + kept.num_steps:
                    return kept
        return self._read(roster, replace(query, first=first, last=last))

    def _read(self, roster: Roster, query: HeatQuery) -> HeatCells:
        bounds = (query.first, query.last, query.from_step, query.to_step)
        newest = self._read_newest(roster, query) if bounds == (None,) * 4 else None
        steps, values = newest or self._read_requested(roster, query)
        first = steps[0] if steps else 0
        per_pass = query.subject.per_pass(self._events, roster, steps)
        return HeatCells(roster, self._peers_of(roster), query.subject, first, values, per_pass)

    def _read_newest(self, roster: Roster, query: HeatQuery) -> tuple[range, Floats] | None:
        """Return the newest steps as found in the footers of segments, which saves a query; None: the footers may be
        wrong.

        The footers also contain wrong step numbers of a single rank, and steps of other rounds.
        """
        bounds = self._events.step_bounds(StepTotals, Where((roster.round,)))
        if bounds is None:
            return None
        steps = range(max(0, bounds[1] - self._max_steps(roster, query) + 1), bounds[1] + 1)
        values = query.subject.cells(self._events, roster, steps)
        with_values = np.flatnonzero((~np.isnan(values)).sum(axis=1) >= min(2, roster.layout.world_size))
        if not len(with_values) or with_values[-1] < len(steps) - _MAX_MISSING:
            return None
        return steps[with_values[0] : with_values[-1] + 1], values[with_values[0] : with_values[-1] + 1]

    def _read_requested(self, roster: Roster, query: HeatQuery) -> tuple[range, Floats]:
        """Return the steps that the query selects, and their cells. Raises: DataError; TooMuchDataError."""
        steps = self._requested_steps(roster, query)
        num_ranks = roster.layout.world_size
        if len(steps) * num_ranks > MAX_RAW_CELLS:
            raise TooMuchDataError(
                f"first={steps[0]}, last={steps[-1]}: {len(steps):,} steps of {num_ranks:,} ranks are more than "
                f"{MAX_RAW_CELLS:,} cells; choose at most {max(1, MAX_RAW_CELLS // num_ranks):,} steps"
            )
        return steps, query.subject.cells(self._events, roster, steps)

    def _requested_steps(self, roster: Roster, query: HeatQuery) -> range:
        """Return the range of steps that the query selects; missing bounds follow from the stored steps."""
        if query.first is not None and query.last is not None:
            return range(query.first, query.last + 1)
        most = self._max_steps(roster, query)
        if query.first is not None:
            most = max(1, MAX_RAW_CELLS // roster.layout.world_size)
        least = query.from_step if query.first is None else query.first
        greatest = query.to_step if query.last is None else query.last
        stored = newest_stored_steps(self._events, roster.round, most, least, greatest)
        if not len(stored):
            return range(0)
        first = int(stored[0]) if query.first is None else query.first
        return range(max(first, int(stored[-1]) - most + 1), int(stored[-1]) + 1)

    def _max_steps(self, roster: Roster, query: HeatQuery) -> int:
        """Return how many steps are shown where the request names none."""
        return max(1, min(_MAX_DEFAULT_STEPS, query.max_cells // roster.layout.world_size))

    def _peers_of(self, roster: Roster) -> Peers:
        """Return the peers of each rank, cached for the round that was requested last."""
        kept = self._peers
        if kept is None or kept[0] is not roster:
            kept = self._peers = (roster, Peers(roster))
        return kept[1]
