"""A collector in this process, with a real server and a real store, and rows to stream to it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.records.diag_records import DaemonRecord
from megatrain_diagnostics.collector.admission import Admission, RowRateLimiter
from megatrain_diagnostics.collector.consumers import Consumer, ConsumerThread
from megatrain_diagnostics.collector.counters import IngestStatistics
from megatrain_diagnostics.collector.event_server import EventServer
from megatrain_diagnostics.collector.ingest import Ingest, IngestLimits, Store
from megatrain_diagnostics.collector.rounds_known import KnownRounds
from megatrain_diagnostics.collector.rows_ahead import RowsAhead
from megatrain_diagnostics.events.tables import Spans
from megatrain_diagnostics.store.event_store import EventStore
from megatrain_diagnostics.store.reader import StoredEvents
from tests.helpers.table_rows import table_rows

TOKEN = "a token that is never sent"


class RunningCollector:
    """Serves on loopback during the block; `store` may replace the real one."""

    def __init__(
        self,
        events: Path,
        *,
        store: Store | None = None,
        consumers: tuple[Consumer, ...] = (),
        port: int = 0,
        session: str = "life-1",
        commit_interval_s: float = 0.02,
        clock_ahead_ns: int = 0,
    ) -> None:
        self._events, self._store, self._consumers = events, store, consumers
        self._port, self._session, self._clock_ahead_ns = port, session, clock_ahead_ns
        self._limits = IngestLimits(commit_interval_s=commit_interval_s)
        self._closing = ExitStack()
        self.statistics, self.rounds = IngestStatistics(), KnownRounds()

    def __enter__(self) -> Self:
        store = self._store or self._closing.enter_context(EventStore(self._events))
        consumers = ConsumerThread(
            self._consumers,
            self.statistics,
            RowsAhead(lambda: self.rounds.latest_in_etcd, self.statistics.count_skipped_rows),
            tick_s=0.05,
        )
        self._closing.callback(consumers.close)
        admission = Admission(self.rounds, RowRateLimiter())
        self.ingest = Ingest(store, admission, self.statistics, consumers, self._limits)
        self._closing.callback(self.ingest.close)
        self.server = EventServer(
            self.ingest, "127.0.0.1", self._port, TOKEN, lambda: time.time_ns() + self._clock_ahead_ns
        )
        self._closing.callback(self._stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    @property
    def record(self) -> DaemonRecord:
        return DaemonRecord("daemon-host", self._session, "127.0.0.1", self.server.port, TOKEN)

    def read(self, kind: Any) -> Any:
        return StoredEvents(self._events).read(kind)

    def _stop(self) -> None:
        self.server.stop(10.0)
        assert self.statistics.counters().connected == (), "a stream did not end"


def span_rows(num_rows: int, *, rank: int = 0, first: int = 0, round_number: int = 0, **columns: Any) -> Spans:
    """Return spans of one rank with sequence numbers from `first` and current times; `columns` replace others."""
    now = time.time_ns()
    values: dict[str, Any] = {
        "round": round_number, "rank": rank, "sequence": first + np.arange(num_rows), "step": 7,
        "operation": Operation.FORWARD_COMPUTE.number, "microbatch": 3, "start_ns": now, "duration_ns": 1000,
        "launch_ns": now,
    }  # fmt: skip
    return table_rows(Spans, values | columns)
