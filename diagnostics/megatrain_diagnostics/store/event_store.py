"""The daemon's store of events, for writing and reading: a directory of segments."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import TableType
from megatrain_diagnostics.store.compaction import compact
from megatrain_diagnostics.store.reader import ALL, StoredEvents
from megatrain_diagnostics.store.retention import Retention, expire
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_diagnostics.store.segments import StoreError


class EventStore(SegmentStore):
    """A directory of segments, with reading. Safe to use from many threads; `maintain` from one at a time."""

    def __init__(self, directory: Path, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        """Lock the directory. Raises: StoreError when another process has it locked, or it cannot be written."""
        super().__init__(directory, now_ns=now_ns)
        self._reader = StoredEvents(directory)
        self.num_bytes = 0
        """Size on disk at the last maintenance."""

    def read(self, kind: type[TableType], where: Where = ALL) -> TableType:
        return self._reader.read(kind, where)

    def problems(self) -> tuple[str, ...]:
        return self._reader.problems()

    def maintain(self, retention: Retention) -> None:
        """Remove old files, then merge small ones: on a full disk, removal frees the space that merging needs.

        Raises: StoreError when files cannot be read, written or removed.
        """
        try:
            self.num_bytes = expire(self.directory, retention, self._now_ns())
            compact(self.directory, self._now_ns())
        except OSError as error:
            raise StoreError(f"{self.directory}: events cannot be merged or removed: {error}") from error
