"""EventStore: what the daemon needs of wherever events are kept, and the store that is a directory of segments.

A store that is scaled out (ClickHouse) is another class with these methods: `read` with its conditions is the window
and the timeline, `heat` the heat map; what is different in its SQL is listed in docs/adr/0021-event-store.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import pyarrow as pa

from megatrain_diagnostics.events.source import EventSource, Where
from megatrain_diagnostics.events.tables import Table, TableType
from megatrain_diagnostics.store.compaction import Compaction, compact
from megatrain_diagnostics.store.heat import HeatMap, HeatQuestion
from megatrain_diagnostics.store.reader import ALL, StoredEvents
from megatrain_diagnostics.store.retention import Expiry, Retention, expire
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_diagnostics.store.segments import StoreError


class EventStore(EventSource, Protocol):
    """A place that events are written to and read from."""

    def append(self, kind: type[Table], batch: pa.RecordBatch) -> None:
        """Hold rows, in the form that they have on the wire, for the next commit. Raises: DataError."""

    def commit(self) -> int:
        """Make durable what was appended; return the number of rows. Raises: StoreError; then it is still held."""

    def heat(self, question: HeatQuestion) -> HeatMap:
        """Return the greatest value in each cell of ranks x steps, and where it is. Raises: DataError."""

    def maintain(self, retention: Retention) -> Maintenance:
        """Merge what is in small parts, remove what is kept no longer. Raises: StoreError."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Maintenance:
    """What was merged, and what was removed."""

    compaction: Compaction
    expiry: Expiry


class ParquetEventStore:
    """A directory of segments: an EventStore. For any threads; `maintain` for one at a time."""

    def __init__(self, directory: Path, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        """Take the directory. Raises: StoreError when another process writes it, or when it cannot be written."""
        self._now_ns = now_ns
        self._writer = SegmentStore(directory, now_ns=now_ns)
        self._reader = StoredEvents(directory)
        self.num_bytes = 0
        """On disk, when it was tidied up last."""

    @property
    def directory(self) -> Path:
        return self._writer.directory

    @property
    def num_pending_rows(self) -> int:
        return self._writer.num_pending_rows

    def append(self, kind: type[Table], batch: pa.RecordBatch) -> None:
        self._writer.append(kind, batch)

    def commit(self) -> int:
        return self._writer.commit()

    def read(self, kind: type[TableType], where: Where = ALL) -> TableType:
        return self._reader.read(kind, where)

    def heat(self, question: HeatQuestion) -> HeatMap:
        return self._reader.heat(question)

    def problems(self) -> tuple[str, ...]:
        return self._reader.problems()

    def maintain(self, retention: Retention) -> Maintenance:
        """Remove first: on a full disk that makes the room to merge in."""
        try:
            expiry = expire(self.directory, retention, self._now_ns())
            self.num_bytes = expiry.kept_bytes
            return Maintenance(compact(self.directory, self._now_ns()), expiry)
        except OSError as error:
            raise StoreError(f"{self.directory}: events cannot be merged or removed: {error}") from error

    def retake(self) -> bool:
        """Say whether somebody has removed the directory, and take the one that is there now, or make it.

        Raises: StoreError when that cannot be done.
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
