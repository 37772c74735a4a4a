"""The daemon's store of events, for writing and reading: a directory of segments."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Table, TableType
from megatrain_diagnostics.store.compaction import Compaction, compact
from megatrain_diagnostics.store.reader import ALL, StoredEvents
from megatrain_diagnostics.store.retention import Expiry, Retention, expire
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_diagnostics.store.segments import StoreError


@dataclass(frozen=True, slots=True)
class Maintenance:
    """The result of merging and removing files."""

    compaction: Compaction
    expiry: Expiry


class EventStore:
    """A directory of segments. Safe to use from many threads; `maintain` from one at a time."""

    def __init__(self, directory: Path, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        """Lock the directory. Raises: StoreError when another process has it locked, or it cannot be written."""
        self._now_ns = now_ns
        self._writer = SegmentStore(directory, now_ns=now_ns)
        self._reader = StoredEvents(directory)
        self.num_bytes = 0
        """Size on disk at the last maintenance."""

    @property
    def directory(self) -> Path:
        return self._writer.directory

    def append(self, kind: type[Table], batch: pa.RecordBatch) -> None:
        self._writer.append(kind, batch)

    def commit(self) -> int:
        return self._writer.commit()

    def read(self, kind: type[TableType], where: Where = ALL) -> TableType:
        return self._reader.read(kind, where)

    def problems(self) -> tuple[str, ...]:
        return self._reader.problems()

    def maintain(self, retention: Retention) -> Maintenance:
        """Remove old files, then merge small ones: on a full disk, removal frees the space that merging needs."""
        try:
            expiry = expire(self.directory, retention, self._now_ns())
            self.num_bytes = expiry.kept_bytes
            return Maintenance(compact(self.directory, self._now_ns()), expiry)
        except OSError as error:
            raise StoreError(f"{self.directory}: events cannot be merged or removed: {error}") from error

    def retake(self) -> bool:
        """If the directory was removed, create it again and lock it; return whether it was removed.

        Raises: StoreError when the directory cannot be created or locked.
        """
        return self._writer.retake()

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
