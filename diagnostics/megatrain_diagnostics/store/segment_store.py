"""Writes rows as segments in a directory; when `commit` returns, they are on disk.

Only the process that holds <events>/lock writes. Any number of processes can read at the same time, without a lock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.file_locks import lock, without_lock
from megatrain.contracts.files.vanished_files import is_in_place
from megatrain.contracts.files.whole_files import is_temporary_name
from megatrain_diagnostics.columns.schema import arrow_schema, to_stored
from megatrain_diagnostics.events.tables import TABLES, Table
from megatrain_diagnostics.store.segments import StoreError, ahead_of, hour_directory, parse_name, write_segment

LOCK_NAME = "lock"
_FOREIGN_NUMBER = 10**15
"""More commits than any store can make: a file with a larger number in its name is foreign."""


_logger = logging.getLogger(__name__)


class SegmentStore(Closable):
    """Buffers rows of any table and writes them as segments. Safe to use from many threads."""

    def __init__(self, directory: Path, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        """Lock the directory. Raises: StoreError when another process has it locked, or it cannot be written."""
        self.directory = directory
        self._now_ns = now_ns
        self._pending: dict[type[Table], list[pa.RecordBatch]] = {}
        self._pending_lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self._lock_file = _take(directory)
        _remove_unfinished(directory)
        self._last = {kind: _last_number(directory / kind.NAME) for kind in TABLES}

    def append(self, kind: type[Table], batch: pa.RecordBatch) -> None:
        """Keep rows, in wire form, for the next commit.

        Raises: DataError for a batch of another form, which would make the commit of other hosts' rows fail.
        """
        wanted = arrow_schema(kind)
        if batch.schema.names != wanted.names or batch.schema.types != wanted.types:
            raise DataError(f"{kind.NAME}: columns {_schema_text(batch.schema)}; expected {_schema_text(wanted)}")
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise DataError(f"{kind.NAME}: {error}") from error
        if any(column.null_count for column in batch.columns):
            raise DataError(f"{kind.NAME}: rows without a value")
        if batch.num_rows:
            plain = pa.RecordBatch.from_arrays(batch.columns, schema=wanted)
            with self._pending_lock:
                self._pending.setdefault(kind, []).append(plain)

    def commit(self) -> None:
        """Write all appended rows durably.

        Raises: StoreError when a file cannot be written; unwritten rows are then kept for the next commit.
        """
        with self._commit_lock:
            with self._pending_lock:
                taken, self._pending = self._pending, {}
            try:
                for kind in list(taken):
                    self._write(kind, taken[kind])
                    del taken[kind]
            finally:
                self._put_back(taken)

    def retake(self) -> bool:
        """If the directory was removed, create it again and lock it; return whether it was removed.

        Raises: StoreError when another process has locked it in the meantime, or it cannot be written.
        """
        with self._commit_lock:
            if is_in_place(self._lock_file, self.directory / LOCK_NAME):
                return False
            lock_file = _take(self.directory)
            os.close(self._lock_file)
            self._lock_file = lock_file
            return True

    def close(self) -> None:
        """Release the lock. Uncommitted rows are lost."""
        with self._commit_lock, suppress(OSError):
            os.close(self._lock_file)

    def _write(self, kind: type[Table], batches: list[pa.RecordBatch]) -> None:
        rows = pa.Table.from_batches(batches)
        written_ns = self._now_ns()
        directory = hour_directory(self.directory / kind.NAME, written_ns)
        number = self._last[kind] + 1
        write_segment(directory, number, number, to_stored(kind, rows), ahead_of(kind, rows, written_ns))
        self._last[kind] = number

    def _put_back(self, batches: dict[type[Table], list[pa.RecordBatch]]) -> None:
        with self._pending_lock:
            for kind, held in batches.items():
                self._pending[kind] = held + self._pending.get(kind, [])


def _take(directory: Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StoreError(f"{directory}: events cannot be written there: {error.strerror}") from error
    try:
        problem = lock(file)
    except BlockingIOError:
        holder = os.pread(file, 100, 0).decode(errors="replace").strip() or "another process"
        os.close(file)
        raise StoreError(f"{directory}: {holder} already writes events there; a job has a single daemon") from None
    if problem:
        _logger.warning("%s", without_lock(directory / LOCK_NAME, problem, "a second daemon from writing events there"))
    with suppress(OSError):  # the disk may be full; the pid is used only in messages
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()}\n".encode(), 0)
    return file


def _remove_unfinished(directory: Path) -> None:
    """Remove temporary files of a writer that was killed."""
    for kind in TABLES:
        for path in (directory / kind.NAME).rglob(".*.tmp"):
            if is_temporary_name(path.name):
                with suppress(OSError):
                    path.unlink()


def _last_number(directory: Path) -> int:
    """Return the greatest number of a segment of a table, including damaged segments.

    Impossibly large numbers are ignored as foreign: numbers that continue from them could get 19 digits.
    """
    names = (parse_name(path.name.removesuffix(".damaged")) for path in directory.rglob("*.parquet*"))
    return max((name.last for name in names if name is not None and name.last < _FOREIGN_NUMBER), default=0)


def _schema_text(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
