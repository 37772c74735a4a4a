"""Events in memory: an EventSource that a test fills, and the reference for a store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.contracts.black_box.values import ClockBase
from megatrain.run_files.run_directory import own_box_paths
from megatrain_diagnostics.events.source import Where, in_order, matching
from megatrain_diagnostics.events.tables import Table, TableType, joined, select
from megatrain_diagnostics.streamer.rank_tail import HostClock, RankTail

_ALL = Where()
_CLOCK = HostClock(ClockBase(monotonic_ns=0, unix_ns=1_700_000_000_000_000_000, error_ns=1))


class MemoryEvents:
    """Events that were created or read elsewhere."""

    def __init__(self, tables: Mapping[type[Table], Table]) -> None:
        self._tables = dict(tables)

    def read(self, kind: type[TableType], where: Where = _ALL) -> TableType:
        table = self._tables.get(kind)
        if table is None:
            return joined(kind, [])
        assert isinstance(table, kind)
        return in_order(select(table, matching(table, where)))

    def problems(self) -> tuple[str, ...]:
        return ()


def recorded_events(directory: Path) -> MemoryEvents:
    """Return all that the ranks of one job recorded in a `telemetry.black_box_directory`."""
    tables: dict[type[Any], list[Any]] = {}
    for path in own_box_paths(directory):
        tail = RankTail(path, _CLOCK)
        for kind, rows in tail.poll():
            tables.setdefault(kind, []).append(rows)
        tail.close()
    return MemoryEvents({kind: joined(kind, parts) for kind, parts in tables.items()})
