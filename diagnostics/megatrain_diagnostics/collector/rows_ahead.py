"""Holds back rows of rounds that are not in etcd yet.

A host may see a new round before the daemon does. A rank that reports a wrong round must not end the analysis of the
round that is training, so consumers get the rows of a round only after the round appears in etcd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from megatrain_diagnostics.events.newest_tables import NewestTables
from megatrain_diagnostics.events.tables import Table, columns_of, select

_MAX_ROWS = 1_000_000


class RowsAhead:
    """For one thread. Beyond a million held rows the oldest are dropped: they are stored but not analyzed."""

    def __init__(
        self, latest_in_etcd: Callable[[], int], note_dropped: Callable[[int], None], max_rows: int = _MAX_ROWS
    ) -> None:
        """`latest_in_etcd`: the newest existing round. `note_dropped`: called with the number of dropped rows."""
        self._latest_in_etcd, self._note_dropped = latest_in_etcd, note_dropped
        self._held = NewestTables[Table](max_rows)

    def take(self, tables: list[Table]) -> list[Table]:
        """Return the rows of existing rounds: first held rows, then new rows, each in the order of arrival."""
        latest = self._latest_in_etcd()
        found: list[Table] = []
        for table in [*self._held.take(), *tables]:
            ahead = _ahead(table, latest)
            if ahead is None:
                found.append(table)
                continue
            if dropped := self._held.add(_chosen(table, ahead)):
                self._note_dropped(dropped)
            if not ahead.all():
                found.append(_chosen(table, ~ahead))
        return found


def _ahead(table: Any, latest: int) -> Any:
    """Return the mask of rows with a round after `latest`; None if there is no such row."""
    if "round" not in columns_of(type(table)):
        return None
    mask = np.asarray(table.round > latest)
    return mask if mask.any() else None


def _chosen(table: Any, rows: Any) -> Table:
    part: Table = select(table, rows)
    return part
