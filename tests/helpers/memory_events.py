"""Events in memory: an EventSource that a test fills, and the reference for a store."""

from __future__ import annotations

from collections.abc import Mapping

from megatrain_diagnostics.events.source import Where, in_order, matching
from megatrain_diagnostics.events.tables import (
    Table,
    TableType,
    columns_of,
    from_columns,
    select,
)

_ALL = Where()


class MemoryEvents:
    """Events that were created or read elsewhere."""

    def __init__(self, tables: Mapping[type[Table], Table]) -> None:
        self._tables = dict(tables)

    def read(self, kind: type[TableType], where: Where = _ALL) -> TableType:
        table = self._tables.get(kind)
        if table is None:
            return from_columns(kind, {name: [] for name in columns_of(kind)})
        assert isinstance(table, kind)
        return in_order(select(table, matching(table, where)))

    def problems(self) -> tuple[str, ...]:
        return ()
