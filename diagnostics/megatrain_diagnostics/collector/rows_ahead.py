"""Holds back rows of rounds that are not in etcd yet.

A host may see a new round before the daemon does. A rank that reports a wrong round must not end the analysis of the
round that is training, so consumers get its rows only after the round appears in etcd.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from megatrain_diagnostics.events.tables import Table, columns_of, num_rows, select

_MAX_ROWS = 1_000_000

Part = tuple[type[Table], Table]


class RowsAhead:
    """For one thread. Beyond a million held rows the oldest are dropped: they are stored but not analyzed."""

    def __init__(
        self, latest_in_etcd: Callable[[], int], note_dropped: Callable[[int], None], max_rows: int = _MAX_ROWS
    ) -> None:
        """`latest_in_etcd`: the newest existing round. `note_dropped`: called with the number of dropped rows."""
        self._latest_in_etcd, self._note_dropped, self._max_rows = latest_in_etcd, note_dropped, max_rows
        self._held: deque[Part] = deque()
        self._num_rows = 0

    def take(self, parts: list[Part]) -> list[Part]:
        """Return the rows of existing rounds: first held rows, then new rows, each in the order of arrival."""
        latest = self._latest_in_etcd()
        found: list[Part] = []
        waiting, self._held, self._num_rows = [*self._held, *parts], deque(), 0
        for kind, table in waiting:
            ahead = _ahead(table, latest)
            if ahead is None:
                found.append((kind, table))
                continue
            self._hold(kind, _chosen(table, ahead))
            if not ahead.all():
                found.append((kind, _chosen(table, ~ahead)))
        return found

    def _hold(self, kind: type[Table], table: Table) -> None:
        self._held.append((kind, table))
        self._num_rows += num_rows(table)
        while self._num_rows > self._max_rows and len(self._held) > 1:
            _, forgotten = self._held.popleft()
            self._num_rows -= num_rows(forgotten)
            self._note_dropped(num_rows(forgotten))


def _ahead(table: Any, latest: int) -> Any:
    """Return the mask of rows with a round after `latest`; None if there is no such row."""
    if "round" not in columns_of(type(table)):
        return None
    mask = np.asarray(table.round > latest)
    return mask if mask.any() else None


def _chosen(table: Any, rows: Any) -> Table:
    part: Table = select(table, rows)
    return part
