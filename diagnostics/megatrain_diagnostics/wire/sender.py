"""The host's side of the event stream: takes tables at any rate, and delivers each to the daemon once and in order.

`send` copies the rows and returns, without disk or network access. One thread keeps a stream to the newest daemon open
and repeats unacknowledged batches; another thread moves batches to disk when they exceed the memory limit. The clocks
of host and daemon are compared every half minute.
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

import numpy as np

from megatrain.contracts.closable import Closable
from megatrain.contracts.pauses import growing_pauses
from megatrain.contracts.records.diag_records import DaemonRecord
from megatrain_diagnostics.events.tables import Clocks, TableType, from_columns, num_rows, select
from megatrain_diagnostics.wire.authentication import SenderName
from megatrain_diagnostics.wire.clock_exchange import ClockReading
from megatrain_diagnostics.wire.connection import CONNECTION_ERRORS, DaemonConnection
from megatrain_diagnostics.wire.discovery import DaemonFinder
from megatrain_diagnostics.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_FRAME_ROWS,
    Acknowledgment,
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
    """Memory for waiting batches; beyond it, the oldest are moved to disk."""
    spool_bytes: int = 256_000_000
    window_bytes: int = 16 << 20
    """Limit of bytes that are sent but not acknowledged."""
    clock_period_s: float = 30.0
    """Time between two comparisons of the clocks."""


@dataclass(frozen=True, slots=True)
class SenderState:
    """The state of a host's stream."""

    is_connected: bool
    problem: str
    """The reason why there is no connection; empty when there is one."""
    outbox: OutboxState
    clock: ClockReading | None
    """The newest comparison with the daemon's clock."""


class Sender(Closable):
    """Streams until `close`. Safe to use from many threads.

    `clock_ns`: the clock of all times in the tables. `spool_directory`: used only by this host and job; None: batches
    are kept in memory only.
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
        self._problem = "no daemon is known yet"
        self._is_leaving = False
        """The daemon has announced that it is about to exit."""
        self._disk_problem = ""
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
            if content.size > MAX_FRAME_BYTES and num_rows(part) > 1:  # its texts are long
                middle = num_rows(part) // 2
                self.send(kind, select(part, np.arange(middle)))
                self.send(kind, select(part, np.arange(middle, num_rows(part))))
            else:
                self._outbox.put(kind.NAME, num_rows(part), self._clock_ns(), content)

    def state(self) -> SenderState:
        connection = self._connection
        is_connected = connection is not None and connection.is_open
        problem = "" if is_connected else self._problem
        return SenderState(
            is_connected,
            "; ".join(filter(None, (problem, self._disk_problem))),
            self._outbox.state(),
            self._clock_reading,
        )

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued rows are acknowledged, at most `timeout_s`; return whether they are."""
        return self._outbox.wait_until_empty(timeout_s, self._closed.is_set)

    def close(self, flush_s: float = 5.0) -> bool:
        """End the stream; return whether all rows were acknowledged within `flush_s`. Other rows stay in the spool."""
        is_empty = self.flush(flush_s)
        self._closed.set()
        self._outbox.wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._outbox.rewind()
        self._spill_now(keep_bytes=0)
        return is_empty

    def _run(self) -> None:
        pauses = growing_pauses(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self._closed.is_set():
            record = self._finder.find()
            if record is None:
                self._finder.wait(_SHORT_WAIT_S)
                continue
            try:
                self._stream_to(record)
                pauses = growing_pauses(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S)
            except CONNECTION_ERRORS as error:
                self._set_problem(f"daemon at {record.address}:{record.port}: {error}")
            self._rest(record, next(pauses) * random.uniform(0.5, 1.0))

    def _rest(self, record: DaemonRecord, pause_s: float) -> None:
        """Wait for `pause_s`, or until there is another daemon."""
        deadline = time.monotonic() + pause_s
        while not self._closed.is_set() and (left_s := deadline - time.monotonic()) > 0:
            self._finder.wait(min(left_s, _SHORT_WAIT_S))
            newest = self._finder.find()
            if newest is not None and newest.session != record.session:
                return

    def _stream_to(self, record: DaemonRecord) -> None:
        """Send until the stream ends, this sender closes, or there is a newer daemon. Raises: CONNECTION_ERRORS."""
        connection = DaemonConnection(record, self.name, self._take_answer, self._outbox.wake)
        self._connection, self._is_leaving = connection, False
        _logger.info("streaming to the daemon at %s:%d", record.address, record.port)
        try:
            self._outbox.rewind()
            self._send_all(connection, record)
            if connection.is_open:
                connection.finish()
                connection.wait(_FINISH_S)
        finally:
            connection.cancel()
        self._set_problem(connection.problem or f"the daemon at {record.address}:{record.port} has ended the stream")

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
        return BatchHeader(batch.table, batch.number, batch.made_unix_ns, state.dropped_rows)

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

    def _take_answer(self, answer: Acknowledgment) -> None:
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
            self._disk_problem = ""
        except OSError as error:
            if not self._disk_problem:
                _logger.warning("events cannot be written to the spool; they are dropped and counted: %s", error)
            self._disk_problem = f"spool: {error.strerror}"

    def _set_problem(self, problem: str) -> None:
        if problem != self._problem and not self._closed.is_set():
            _logger.warning("no stream to the daemon; events are kept on this host: %s", problem)
        self._problem = problem


def _spool(directory: Path | None) -> Spool | None:
    """Return the spool; None if there is no usable directory, so that batches are kept in memory only."""
    if directory is None:
        return None
    try:
        return Spool(directory)
    except OSError as error:
        _logger.warning("the spool cannot be used; events that do not fit in memory will be dropped: %s", error)
        return None
