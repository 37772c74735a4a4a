"""Collects the ranks of the newest round, as their rows arrive in parts."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from megatrain_diagnostics.events.roster import Roster, make_roster
from megatrain_diagnostics.events.rows import pair_keys
from megatrain_diagnostics.events.tables import Groups, Ranks, Spans, StepTotals, Values, joined, select

OfRanks = TypeVar("OfRanks", Spans, StepTotals, Values)


class RosterBuilder:
    """Keeps rows of the newest round only, and of each rank only the newest ones."""

    def __init__(self) -> None:
        self.newest = -1
        """Number of the newest round; -1: none is known."""
        self._ranks = joined(Ranks, [])
        self._groups = joined(Groups, [])

    def add(self, table: Ranks | Groups) -> bool:
        """Add rows, and return whether they begin a newer round."""
        if isinstance(table, Groups):
            self._groups = joined(Groups, [self._groups, select(table, table.round >= self.newest)])
            self._groups = select(self._groups, _last_of(self._groups.rank, self._groups.group))
            return False
        if not len(table.round):
            return False
        newest = int(table.round.max())
        is_new = newest > self.newest
        if is_new:
            self.newest = newest
            self._ranks = joined(Ranks, [])
            self._groups = select(self._groups, self._groups.round == newest)
        self._ranks = joined(Ranks, [self._ranks, select(table, table.round == self.newest)])
        self._ranks = select(self._ranks, _last_of(self._ranks.rank, np.zeros_like(self._ranks.rank)))
        return is_new

    def roster(self) -> Roster:
        """Return the roster. Raises: DataError if ranks report different layouts, without a majority."""
        return make_roster(self._ranks, self._groups, self.newest)

    def of_newest(self, table: OfRanks) -> OfRanks:
        """Return the rows of the newest round."""
        rows = table.round == self.newest
        return table if rows.all() else select(table, rows)


def _last_of(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the indices of the last row of each pair, ascending."""
    _, places = np.unique(pair_keys(first, second)[::-1], return_index=True)
    return np.sort(len(first) - 1 - places)
