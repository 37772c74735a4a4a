"""Passes committed rows to the live analyses in a separate thread, so that analyses do not delay commits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from megatrain_diagnostics.collector.counters import IngestStatistics
from megatrain_diagnostics.collector.rows_ahead import RowsAhead
from megatrain_diagnostics.events.newest_tables import NewestTables
from megatrain_diagnostics.events.tables import Table, num_rows

_logger = logging.getLogger(__name__)
_TICK_S = 1.0
_MAX_ROWS = 4_000_000
_WARNING_PAUSE_S = 60.0


class Consumer(Protocol):
    """Analyzes rows as they arrive. Both methods are called from one thread, and their errors are logged."""

    def consume(self, table: Table) -> None:
        """Receive rows that are on disk: of a round that has not ended, or of a host's devices."""

    def tick(self, now_s: float) -> None:
        """Called about once a second with the unix time, also when no rows arrive."""


class ConsumerThread:
    """Runs consumers until `close`. When they are too slow, the oldest queued rows are skipped and counted."""

    def __init__(
        self,
        consumers: Sequence[Consumer],
        statistics: IngestStatistics,
        ahead: RowsAhead,
        *,
        tick_s: float = _TICK_S,
    ) -> None:
        """`ahead` holds back the rows of rounds that do not exist yet."""
        self._ahead = ahead
        self._consumers, self._statistics, self._tick_s = tuple(consumers), statistics, tick_s
        self._changed = threading.Condition()
        self._waiting = NewestTables[Table](_MAX_ROWS)
        self._is_closed = False
        self._next_warning_s = float("-inf")
        self._thread = threading.Thread(target=self._run, name="consumers of events", daemon=True)
        self._thread.start()

    def put(self, table: Table) -> None:
        """Queue rows for the consumers. Never waits."""
        if not self._consumers or not num_rows(table):
            return
        with self._changed:
            self._statistics.count_skipped_rows(self._waiting.add(table))
            self._changed.notify()

    def close(self) -> None:
        """Pass the queued rows to the consumers, then end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        next_tick_s = time.monotonic() + self._tick_s
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._waiting.tables or self._is_closed, max(0.0, next_tick_s - time.monotonic())
                )
                tables = self._waiting.take()
                is_last = self._is_closed
            for table in self._ahead.take(tables):
                for consumer in self._consumers:
                    self._guarded(consumer, table)
            if time.monotonic() >= next_tick_s:
                for consumer in self._consumers:
                    self._guarded(consumer, None)
                next_tick_s = time.monotonic() + self._tick_s
            if is_last:
                return

    def _guarded(self, consumer: Consumer, table: Table | None) -> None:
        """Pass a table to a consumer, or call its `tick`."""
        try:
            if table is None:
                consumer.tick(time.time())
            else:
                consumer.consume(table)
        except Exception:
            # a failing consumer must not end the stream of events; the log is limited so that it does not fill the disk
            if time.monotonic() >= self._next_warning_s:
                self._next_warning_s = time.monotonic() + _WARNING_PAUSE_S
                _logger.exception("%s failed; events are still stored", type(consumer).__name__)
