"""The host's end of the stream: takes tables at any rate, and delivers them to the daemon once and in order.

`send` copies the rows and returns: no disk, no network. One thread keeps one stream to the newest daemon and replays
unacknowledged batches; another moves batches that exceed the memory to disk. Clocks are compared now and then.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from megatrain.contracts.records.diag_records import DaemonRecord
from megatrain_diagnostics.events.tables import Clocks, TableType, from_columns, num_rows, select
from megatrain_diagnostics.wire.authentication import SenderName
from megatrain_diagnostics.wire.clock_exchange import ClockReading
from megatrain_diagnostics.wire.connection import CONNECTION_ERRORS, DaemonConnection
from megatrain_diagnostics.wire.discovery import DaemonFinder
from megatrain_diagnostics.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_FRAME_ROWS,
    Acknowledgement,
    BatchHeader,
    batch_bytes,
)
from megatrain_diagnostics.wire.outbox import Batch, Outbox, OutboxState
from megatrain_diagnostics.wire.spool import Spool

_logger = logging.getLogger(__name__)
_SHORTEST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_SHORT_WAIT_S = 0.5
_FINISH_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderLimits:
    """Limits of a sender's resources."""

    memory_bytes: int = 8 << 20
    """Memory for waiting batches; beyond it the disk is used."""
    spool_bytes: int = 256_000_000
    window_bytes: int = 16 << 20
    """Most bytes that may be sent and not acknowledged."""
    clock_period_s: float = 30.0
    """Time between two comparisons of clocks."""


@dataclass(frozen=True, slots=True)
class SenderState:
    """The state of a host's stream."""

    is_connected: bool
    num_connections: int
    """Connections made so far."""
    trouble: str
    """Why there is no connection; empty when there is one."""
    outbox: OutboxState
    clock: ClockReading | None
    """The newest comparison with the daemon's clock."""


class Sender:
    """Streams until `close`. Safe to use from many threads.

    `clock_ns` is the host's one clock base, which all times in the tables use. Only this host and job use
    `spool_directory`; it is None for a sender without a disk.
    """

    def __init__(
        self,
        host: str,
        finder: DaemonFinder,
        spool_directory: Path | None,
        limits: SenderLimits = SenderLimits(),
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.name = SenderName(host, f"{time.time_ns():016x}{secrets.token_hex(4)}")
        self._finder, self._limits, self._clock_ns = finder, limits, clock_ns
        self._outbox = Outbox(limits.memory_bytes, _spool(spool_directory), limits.spool_bytes)
        self._connection: DaemonConnection | None = None
        self._clock_reading: ClockReading | None = None
        self._num_connections = 0
        self._trouble = "no daemon is known yet"
        self._is_leaving = False
        """The daemon announced its end."""
        self._disk_trouble = ""
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"event sender {target.__name__}", daemon=True)
            for target in (self._run, self._spill)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, kind: type[TableType], table: TableType) -> None:
        """Queue the rows of a table. Returns at once; when memory and disk are full, the oldest batches are dropped."""
        total = num_rows(table)
        for first in range(0, total, MAX_FRAME_ROWS):
            part = (
                select(table, np.arange(first, min(total, first + MAX_FRAME_ROWS))) if total > MAX_FRAME_ROWS else table
            )
            content = batch_bytes(part)
            if content.size > MAX_FRAME_BYTES and num_rows(part) > 1:  # long texts
                middle = num_rows(part) // 2
                self.send(kind, select(part, np.arange(middle)))
                self.send(kind, select(part, np.arange(middle, num_rows(part))))
            else:
                self._outbox.put(kind.NAME, num_rows(part), self._clock_ns(), content)

    def state(self) -> SenderState:
        connection = self._connection
        is_connected = connection is not None and connection.is_open
        trouble = "" if is_connected else self._trouble
        return SenderState(
            is_connected,
            self._num_connections,
            "; ".join(filter(None, (trouble, self._disk_trouble))),
            self._outbox.state(),
            self._clock_reading,
        )

    def flush(self, timeout_s: float) -> bool:
        """Return whether everything sent so far was acknowledged in time."""
        return self._outbox.wait_until_empty(timeout_s, self._closed.is_set)

    def close(self, flush_s: float = 5.0) -> bool:
        """End the stream; return whether everything was acknowledged within `flush_s`. The rest stays in the spool."""
        is_empty = self.flush(flush_s)
        self._closed.set()
        self._outbox.wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._outbox.rewind()
        self._spill_now(keep_bytes=0)
        return is_empty

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        num_failures = 0
        while not self._closed.is_set():
            record = self._finder.find()
            if record is None:
                self._finder.wait(_SHORT_WAIT_S)
                continue
            try:
                self._stream_to(record)
                num_failures = 0
            except CONNECTION_ERRORS as error:
                num_failures += 1
                self._note_trouble(f"daemon at {record.address}:{record.port}: {error}")
            self._rest(record, num_failures)

    def _rest(self, record: DaemonRecord, num_failures: int) -> None:
        """Wait before the next try, unless another daemon has appeared."""
        pause_s = min(_SHORTEST_PAUSE_S * 2 ** min(num_failures, 10), _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
        deadline = time.monotonic() + pause_s
        while not self._closed.is_set() and (left_s := deadline - time.monotonic()) > 0:
            self._finder.wait(min(left_s, _SHORT_WAIT_S))
            newest = self._finder.find()
            if newest is not None and newest.session != record.session:
                return

    def _stream_to(self, record: DaemonRecord) -> None:
        """Send until the stream ends, or has to end. Raises: CONNECTION_ERRORS."""
        connection = DaemonConnection(record, self.name, self._take_answer, self._outbox.wake)
        self._connection, self._is_leaving = connection, False
        self._num_connections += 1
        _logger.info("streaming to the daemon at %s:%d", record.address, record.port)
        try:
            self._outbox.rewind()
            self._send_all(connection, record)
            if connection.is_open:
                connection.finish()
                connection.wait(_FINISH_S)
        finally:
            connection.cancel()
        self._note_trouble(connection.trouble or f"the daemon at {record.address}:{record.port} has ended the stream")

    def _send_all(self, connection: DaemonConnection, record: DaemonRecord) -> None:
        next_clock = time.monotonic()
        while connection.is_open and not self._closed.is_set() and not self._is_leaving:
            newest = self._finder.find()
            if newest is not None and newest.session != record.session:
                return
            if time.monotonic() >= next_clock:
                self._compare_clocks(connection)
                next_clock = time.monotonic() + self._limits.clock_period_s
            batch = self._outbox.take(_SHORT_WAIT_S, self._limits.window_bytes)
            if batch is not None:
                connection.send(self._header(batch), batch.content)

    def _header(self, batch: Batch) -> BatchHeader:
        state = self._outbox.state()
        return BatchHeader(batch.table, batch.number, batch.made_unix_ns, state.dropped_rows, state.dropped_batches)

    def _compare_clocks(self, connection: DaemonConnection) -> None:
        try:
            reading = connection.clock(self._clock_ns)
        except TimeoutError:  # the daemon waits for its disk; the stream continues
            return
        self._clock_reading = reading
        row = {
            "at_ns": [reading.answered_ns], "offset_ns": [reading.offset_ns], "error_ns": [reading.error_ns],
            "host": [self.name.host],
        }  # fmt: skip
        self.send(Clocks, from_columns(Clocks, row))

    def _take_answer(self, answer: Acknowledgement) -> None:
        if answer.is_closing:
            self._is_leaving = True
        self._outbox.acknowledge(answer.through)

    def _spill(self) -> None:
        while not self._closed.is_set():
            if self._outbox.wait_for_spill(_SHORT_WAIT_S):
                self._spill_now()

    def _spill_now(self, keep_bytes: int | None = None) -> None:
        try:
            self._outbox.spill(keep_bytes)
            self._disk_trouble = ""
        except OSError as error:
            if not self._disk_trouble:
                _logger.warning("the spool cannot take more events; they are dropped and counted: %s", error)
            self._disk_trouble = f"spool: {error.strerror}"

    def _note_trouble(self, trouble: str) -> None:
        if trouble != self._trouble and not self._closed.is_set():
            _logger.warning("events wait on this host: %s", trouble)
        self._trouble = trouble


def _spool(directory: Path | None) -> Spool | None:
    """Return the spool; None where the directory is not usable: then batches have only memory."""
    if directory is None:
        return None
    try:
        return Spool(directory)
    except OSError as error:
        _logger.warning("no spool: events that do not fit in memory will be dropped: %s", error)
        return None
