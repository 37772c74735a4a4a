"""Stores each batch once and in order, and acknowledges it when a commit has made it durable.

Streams only append batches to a list. One thread moves the list to the store and commits, so that all streams share one
fsync: at most `commit_interval_s` after a batch arrived, earlier if there are many rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from megatrain.contracts.errors import CoordinationError, DataError, MegatrainError
from megatrain.contracts.records.record import decode
from megatrain.formatting import printable
from megatrain_diagnostics.collector.admission import Admission, Admitted, RefusedBatchError
from megatrain_diagnostics.collector.consumers import ConsumerThread
from megatrain_diagnostics.collector.counters import IngestStatistics, RejectionReason
from megatrain_diagnostics.events.tables import Table
from megatrain_diagnostics.wire.authentication import SenderName
from megatrain_diagnostics.wire.messages import MAX_FRAME_BYTES, BatchHeader

_logger = logging.getLogger(__name__)
_MAX_SESSIONS = 20_000
_RETRY_S = 1.0
_WARNING_PAUSE_S = 60.0


class Store(Protocol):
    """Makes rows durable."""

    def append(self, kind: type[Table], batch: pa.RecordBatch) -> None:
        """Keep rows for the next commit. Raises: DataError."""

    def commit(self) -> None:
        """Make all appended rows durable. Raises: MegatrainError; the rows are then kept for the next commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestLimits:
    """The interval of commits, and limits on the data that wait for a commit."""

    commit_interval_s: float = 0.5
    commit_rows: int = 1_000_000
    pending_bytes: int = 256 << 20
    """While more bytes wait for a commit, streams are not read, and hosts keep batches in their spools."""


class SenderSession:
    """One run of a host's sender process, with all the streams that it opens."""

    def __init__(self, name: SenderName) -> None:
        self.name = name
        self.lock = threading.Lock()
        """Held from the check of a batch's number until the batch is queued, so that batches of two streams of a
        session stay in order."""
        self.received = -1
        self._acknowledged = -1
        self._changed = threading.Condition()

    @property
    def acknowledged(self) -> int:
        return self._acknowledged

    def acknowledge(self, through: int) -> None:
        with self._changed:
            self._acknowledged = max(self._acknowledged, through)
            self._changed.notify_all()

    def wait(self, known: int, timeout_s: float, over: Sequence[threading.Event] = ()) -> None:
        """Wait up to `timeout_s` until a number above `known` is acknowledged.

        Return earlier if one of `over` is set and `wake` is called.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._acknowledged > known or any(event.is_set() for event in over), timeout_s
            )

    def wake(self) -> None:
        """Wake all waiting threads to check again."""
        with self._changed:
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Pending:
    session: SenderSession
    number: int
    num_bytes: int
    admitted: Admitted | None
    """None: the batch had no usable row; it is acknowledged without being stored."""


class Ingest:
    """Takes batches from any thread until `close`."""

    def __init__(
        self,
        store: Store,
        admission: Admission,
        statistics: IngestStatistics,
        consumers: ConsumerThread,
        limits: IngestLimits = IngestLimits(),
    ) -> None:
        self._store, self._admission, self.statistics, self._consumers = store, admission, statistics, consumers
        self._limits = limits
        self._admission_lock = threading.Lock()
        self._sessions_lock = threading.Lock()
        self._sessions: OrderedDict[SenderName, SenderSession] = OrderedDict()
        self._changed = threading.Condition()
        self._pending: list[_Pending] = []
        self._pending_rows = self._pending_bytes = 0
        self._oldest_s = 0.0
        self._is_closed = False
        self._next_warning_s = float("-inf")
        self.problem = ""
        """The reason why nothing can be committed; empty when commits work."""
        self._thread = threading.Thread(target=self._run, name="commits of events", daemon=True)
        self._thread.start()

    def session(self, name: SenderName) -> SenderSession:
        """Return the session of this name; a new one if it is not known."""
        with self._sessions_lock:
            session = self._sessions.setdefault(name, SenderSession(name))
            self._sessions.move_to_end(name)
            while len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
            return session

    def wake_sessions(self) -> None:
        """Wake the answering threads of all streams to check again."""
        with self._sessions_lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.wake()

    def take(self, session: SenderSession, metadata: bytes, content: pa.Buffer | None) -> None:
        """Check and queue one batch of a stream; `content` None: the batch was too long.

        Blocks while more than `IngestLimits.pending_bytes` wait for a commit.
        """
        host = session.name.host
        try:
            header = decode(BatchHeader, metadata, "header of a batch")
            if header.number < 0:
                raise CoordinationError(f"header of a batch: number={header.number}; expected at least 0")
        except CoordinationError as error:
            self.statistics.count_refused_batch(RejectionReason.BAD_HEADER, host, str(error))
            return
        self.statistics.record_dropped_rows(host, session.name.session, header.dropped_rows)
        with session.lock:
            num_bytes = 0 if content is None else content.size
            is_duplicate = header.number <= session.received
            self.statistics.count_batch(num_bytes, is_duplicate=is_duplicate)
            if not is_duplicate and self._put(
                _Pending(session, header.number, num_bytes, self._admit(host, header, content))
            ):
                session.received = header.number

    def close(self) -> None:
        """Try to commit and acknowledge the received batches, then end the thread. Later batches are ignored."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _admit(self, host: str, header: BatchHeader, content: pa.Buffer | None) -> Admitted | None:
        try:
            if content is None:
                raise DataError(f"a batch of more than {MAX_FRAME_BYTES} bytes")
            with self._admission_lock:
                admitted = self._admission.admit(host, header, content)
        except DataError as error:
            self.statistics.count_refused_batch(RejectionReason.NO_BATCH, host, str(error))
            return None
        except RefusedBatchError as error:
            self.statistics.count_refused_batch(error.reason, host, str(error))
            return None
        except Exception as error:
            # an error in megatrain: without an answer the host would send this batch forever, and no later one
            _logger.exception("a batch of host %s could not be checked", printable(host))
            self.statistics.count_refused_batch(RejectionReason.NO_BATCH, host, f"{type(error).__name__}: {error}")
            return None
        for reason, num_rows in admitted.refused.items():
            self.statistics.count_refused_rows(reason, host, num_rows)
        if admitted.old_rows:
            self.statistics.count_old_rows(admitted.old_rows)
        return admitted

    def _put(self, pending: _Pending) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._pending_bytes < self._limits.pending_bytes)
            if self._is_closed:
                return False
            if not self._pending:
                self._oldest_s = time.monotonic()
            self._pending.append(pending)
            self._pending_bytes += pending.num_bytes
            self._pending_rows += 0 if pending.admitted is None else pending.admitted.stored.num_rows
            if len(self._pending) == 1 or self._pending_rows >= self._limits.commit_rows:
                self._changed.notify_all()
            return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._pending)
                due_s = self._oldest_s + self._limits.commit_interval_s
                self._changed.wait_for(self._is_due, max(0.0, due_s - time.monotonic()))
                taken, self._pending = self._pending, []
                self._pending_rows = 0
            if taken and not self._commit(taken):
                return
            with self._changed:
                self._pending_bytes -= sum(pending.num_bytes for pending in taken)
                self._changed.notify_all()
                if self._is_closed and not self._pending:
                    return

    def _is_due(self) -> bool:
        return self._is_closed or self._pending_rows >= self._limits.commit_rows

    def _commit(self, taken: list[_Pending]) -> bool:
        """Make batches durable, with retries, and acknowledge them; return False if `close` came before a success."""
        rows: Counter[str] = Counter()
        for pending in taken:
            if pending.admitted is not None:
                self._append(pending.session.name.host, pending.admitted, rows)
        while not self._try_commit():
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closed, _RETRY_S):
                    break
        if self.problem and not self._try_commit():
            return False
        self.statistics.count_commit(rows)
        through: dict[SenderSession, int] = {}
        for pending in taken:
            through[pending.session] = max(pending.number, through.get(pending.session, -1))
            if pending.admitted is not None:
                self._consumers.put(pending.admitted.live)
        for session, number in through.items():
            session.acknowledge(number)
        return True

    def _append(self, host: str, admitted: Admitted, rows: Counter[str]) -> None:
        try:
            self._store.append(admitted.kind, admitted.stored)
            rows[admitted.kind.NAME] += admitted.stored.num_rows
        except DataError as error:
            self.statistics.count_refused_batch(RejectionReason.NO_BATCH, host, str(error))

    def _try_commit(self) -> bool:
        try:
            self._store.commit()
        except (MegatrainError, OSError) as error:
            self.statistics.count_failed_commit()
            self.problem = str(error)
            if time.monotonic() >= self._next_warning_s:
                self._next_warning_s = time.monotonic() + _WARNING_PAUSE_S
                _logger.error("events cannot be stored; hosts keep them in their spools: %s", error)
            return False
        if self.problem:
            _logger.warning("events are stored again")
        self.problem = ""
        return True
