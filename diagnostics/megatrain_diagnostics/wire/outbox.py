"""Keeps batches until they are sent and acknowledged: in memory up to a limit, then on disk up to a limit.

Beyond both limits the oldest batch is dropped and counted; all others are kept until the daemon acknowledges them.
`put` neither blocks nor writes to disk: a thread of the sender moves batches to disk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from megatrain_diagnostics.wire.spool import Spool, read_spooled, remove_spooled

_HARD_FACTOR = 8
"""While the disk is slower than the incoming batches, memory may grow to this many times its limit before batches are
dropped: around an incident all black boxes of a host are sent at once."""


@dataclass(slots=True, eq=False)
class Batch:
    """One batch, in memory or on disk."""

    number: int
    table: str
    num_rows: int
    num_bytes: int
    made_unix_ns: int
    content: pa.Buffer | None
    path: Path | None = None
    is_idle: bool = False
    """In memory, neither in flight nor being written to disk."""
    is_sent: bool = False
    is_moving: bool = False
    """Being written to disk."""
    is_over: bool = False
    """Acknowledged or dropped."""


@dataclass(frozen=True, slots=True)
class OutboxState:
    """The fill level of an outbox, and the data that it has dropped."""

    num_batches: int
    """Number of batches that are not sent, or not acknowledged."""
    memory_bytes: int
    """Size of the batches in memory that are not in flight."""
    spooled_bytes: int
    in_flight_bytes: int
    acknowledged_rows: int
    dropped_rows: int


@dataclass(slots=True)
class _Queues:
    """Batches, the oldest first. Entries with `is_over` are ignored."""

    unsent: deque[Batch] = field(default_factory=deque)
    sent: deque[Batch] = field(default_factory=deque)
    in_memory: deque[Batch] = field(default_factory=deque)
    """Batches in memory that are not in flight."""
    spooled: deque[Batch] = field(default_factory=deque)


class Outbox:
    """A queue of batches; safe to use from many threads. Without a spool, only the memory limit applies."""

    def __init__(self, memory_bytes: int, spool: Spool | None = None, spool_bytes: int = 0) -> None:
        self._memory_bytes, self._spool, self._spool_bytes = memory_bytes, spool, spool_bytes
        self._changed = threading.Condition()
        self._queues = _Queues()
        self._in_memory_bytes = self._spooled_bytes = self._in_flight_bytes = 0
        self._acknowledged_rows = self._dropped_rows = 0
        self._num_batches = self._num_wakes = 0
        self._next_number = 0
        for spooled in spool.found() if spool is not None else ():
            batch = self._new_batch(spooled.table, spooled.num_rows, spooled.num_bytes, spooled.made_unix_ns)
            batch.path = spooled.path
            self._queues.spooled.append(batch)
            self._spooled_bytes += batch.num_bytes
        self._trim_spool()

    def put(self, table: str, num_rows: int, made_unix_ns: int, content: pa.Buffer) -> None:
        """Add a batch. When memory is full, drop the oldest batches in memory."""
        with self._changed:
            batch = self._new_batch(table, num_rows, content.size, made_unix_ns)
            batch.content, batch.is_idle = content, True
            self._queues.in_memory.append(batch)
            self._in_memory_bytes += batch.num_bytes
            bound = self._memory_bytes * (_HARD_FACTOR if self._spool is not None else 1)
            # the newest batch is kept even if it is larger than the limit
            while self._in_memory_bytes > max(bound, batch.num_bytes) and (oldest := self._pop_memory()) is not None:
                self._drop(oldest)
            self._changed.notify_all()

    def take(self, timeout_s: float, window_bytes: int) -> Batch | None:
        """Return the next batch to send, with its content in memory; None after `timeout_s`, or after `wake`.

        If the file of a spooled batch cannot be read, the batch is dropped, and None is returned.
        At most `window_bytes` can be in flight (sent, not acknowledged), unless a single batch is larger.
        """
        with self._changed:
            woken = self._num_wakes
            self._changed.wait_for(lambda: self._has_next(window_bytes) or self._num_wakes != woken, timeout_s)
            if not self._has_next(window_bytes):
                return None
            batch = self._queues.unsent.popleft()
            if batch.is_idle:  # then the batch is also the oldest one in `in_memory`
                self._pop_memory()
            self._queues.sent.append(batch)
            batch.is_sent = True
            self._in_flight_bytes += batch.num_bytes
            content, path = batch.content, batch.path
        if content is None:
            assert path is not None
            try:
                content = read_spooled(path)
            except OSError:
                with self._changed:
                    self._drop(batch)
                return None
        return Batch(batch.number, batch.table, batch.num_rows, batch.num_bytes, batch.made_unix_ns, content)

    def acknowledge(self, through: int) -> None:
        """Remove all batches up to a number."""
        paths = []
        with self._changed:
            for queue in (self._queues.sent, self._queues.unsent):
                while queue and queue[0].number <= through:
                    batch = queue.popleft()
                    if not batch.is_over:
                        self._acknowledged_rows += batch.num_rows
                        paths.append(self._end(batch))
            self._changed.notify_all()
        _remove(paths)

    def rewind(self) -> None:
        """Queue all unacknowledged batches to be sent again, on a new stream."""
        with self._changed:
            again = [batch for batch in self._queues.sent if not batch.is_over]
            self._queues.sent.clear()
            self._in_flight_bytes = 0
            self._queues.unsent.extendleft(reversed(again))
            idle = [batch for batch in again if batch.content is not None and not batch.is_moving]
            self._queues.in_memory.extendleft(reversed(idle))
            self._in_memory_bytes += sum(batch.num_bytes for batch in idle)
            for batch in again:
                batch.is_sent = False
            for batch in idle:
                batch.is_idle = True

    def wait_until_empty(self, timeout_s: float, is_given_up: Callable[[], bool]) -> bool:
        """Wait at most `timeout_s` until all batches are acknowledged or `is_given_up`; return whether none is left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_batches or is_given_up(), timeout_s)
            return not self._num_batches

    def wait_for_spill(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until memory exceeds its limit, or `wake`; return whether it exceeds its limit."""
        with self._changed:
            woken = self._num_wakes
            self._changed.wait_for(lambda: self._has_spill(self._memory_bytes) or self._num_wakes != woken, timeout_s)
            return self._has_spill(self._memory_bytes)

    def spill(self, keep_bytes: int | None = None) -> None:
        """Move the oldest batches that are not in flight to disk until at most `keep_bytes` are in memory.

        None: the memory limit.

        Raises: OSError when the disk is full; the batch that could not be written is dropped.
        """
        bound = self._memory_bytes if keep_bytes is None else keep_bytes
        while (batch := self._next_spill(bound)) is not None:
            assert self._spool is not None
            assert batch.content is not None
            try:
                path = self._spool.write(batch.content, batch.table, batch.number, batch.num_rows, batch.made_unix_ns)
            except OSError:
                with self._changed:
                    batch.is_moving = False
                    self._drop(batch)
                raise
            with self._changed:
                batch.is_moving = False
                was_over = batch.is_over  # the batch was acknowledged during the write
                if not was_over:
                    batch.content, batch.path = None, path
                    self._spooled_bytes += batch.num_bytes
                    self._queues.spooled.append(batch)
            if was_over:
                remove_spooled(path)
            self._trim_spool()

    def state(self) -> OutboxState:
        with self._changed:
            return OutboxState(
                num_batches=self._num_batches,
                memory_bytes=self._in_memory_bytes,
                spooled_bytes=self._spooled_bytes,
                in_flight_bytes=self._in_flight_bytes,
                acknowledged_rows=self._acknowledged_rows,
                dropped_rows=self._dropped_rows,
            )

    def wake(self) -> None:
        """Wake all waiting threads to check again."""
        with self._changed:
            self._num_wakes += 1
            self._changed.notify_all()

    def _new_batch(self, table: str, num_rows: int, num_bytes: int, made_unix_ns: int) -> Batch:
        batch = Batch(self._next_number, table, num_rows, num_bytes, made_unix_ns, content=None)
        self._next_number += 1
        self._num_batches += 1
        self._queues.unsent.append(batch)
        return batch

    def _has_next(self, window_bytes: int) -> bool:
        while self._queues.unsent and self._queues.unsent[0].is_over:
            self._queues.unsent.popleft()
        in_flight = self._in_flight_bytes
        return bool(self._queues.unsent) and (
            in_flight == 0 or in_flight + self._queues.unsent[0].num_bytes <= window_bytes
        )

    def _has_spill(self, bound: int) -> bool:
        return self._spool is not None and self._in_memory_bytes > bound

    def _next_spill(self, bound: int) -> Batch | None:
        with self._changed:
            batch = self._pop_memory() if self._has_spill(bound) else None
            if batch is not None:
                batch.is_moving = True
            return batch

    def _pop_memory(self) -> Batch | None:
        """Remove and return the oldest batch in memory that is not in flight."""
        while self._queues.in_memory:
            batch = self._queues.in_memory.popleft()
            if not batch.is_over:
                batch.is_idle = False
                self._in_memory_bytes -= batch.num_bytes
                return batch
        return None

    def _drop(self, batch: Batch) -> None:
        if batch.is_over:
            return
        self._dropped_rows += batch.num_rows
        self._end(batch)
        self._changed.notify_all()

    def _end(self, batch: Batch) -> Path | None:
        """Mark a batch as acknowledged or dropped; return the file to remove, if any."""
        if batch.is_sent:
            self._in_flight_bytes -= batch.num_bytes
        elif batch.is_idle:
            self._in_memory_bytes -= batch.num_bytes
        if batch.path is not None:
            self._spooled_bytes -= batch.num_bytes
        batch.is_over = True
        batch.content = None
        self._num_batches -= 1
        return batch.path

    def _trim_spool(self) -> None:
        paths = []
        with self._changed:
            while self._spooled_bytes > self._spool_bytes and self._queues.spooled:
                batch = self._queues.spooled.popleft()
                if not batch.is_over:
                    paths.append(batch.path)
                    self._drop(batch)
            while self._queues.spooled and self._queues.spooled[0].is_over:
                self._queues.spooled.popleft()
        _remove(paths)


def _remove(paths: list[Path | None]) -> None:
    for path in paths:
        if path is not None:
            remove_spooled(path)
