"""A queue of tables with a limit of rows, beyond which the oldest tables are dropped."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from megatrain_diagnostics.events.tables import Table, num_rows

AnyTable = TypeVar("AnyTable", bound=Table)


class NewestTables(Generic[AnyTable]):
    """Tables in the order in which they were added. The newest table is kept even if it is larger than the limit."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._tables: deque[AnyTable] = deque()
        self._num_rows = 0

    @property
    def tables(self) -> Sequence[AnyTable]:
        return tuple(self._tables)

    def add(self, table: AnyTable) -> int:
        """Add a table, and return the number of rows that were dropped for it."""
        self._tables.append(table)
        self._num_rows += num_rows(table)
        before = self._num_rows
        while self._num_rows > self._max_rows and len(self._tables) > 1:
            self._num_rows -= num_rows(self._tables.popleft())
        return before - self._num_rows

    def take(self) -> list[AnyTable]:
        """Remove and return all tables."""
        taken, self._num_rows = list(self._tables), 0
        self._tables.clear()
        return taken
