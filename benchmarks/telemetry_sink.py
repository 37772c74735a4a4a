"""A minimal daemon that behaves to a host like one on another machine: `python -m benchmarks.telemetry_sink JOB ETCD`.

It receives and acknowledges events with all checks, but neither stores nor judges them, because that would be the work
of another machine.
"""

from __future__ import annotations

import secrets
import signal
import socket
import sys
import threading
from contextlib import ExitStack

import pyarrow as pa

from megatrain.contracts.records.diag_records import DaemonRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain_diagnostics.collector.admission import Admission, RowRateLimiter
from megatrain_diagnostics.collector.consumers import ConsumerThread
from megatrain_diagnostics.collector.counters import IngestStatistics
from megatrain_diagnostics.collector.event_server import EventServer
from megatrain_diagnostics.collector.ingest import Ingest
from megatrain_diagnostics.collector.rounds_known import KnownRounds
from megatrain_diagnostics.collector.rows_ahead import RowsAhead
from megatrain_diagnostics.events.tables import Table
from megatrain_job.coordination.announcement import Announcement
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings

LOOPBACK = "127.0.0.1"
_GOODBYE_S = 3.0


class Nowhere:
    """A store that keeps nothing."""

    def append(self, kind: type[Table], batch: pa.RecordBatch) -> None:
        """Discard the rows."""

    def commit(self) -> None:
        """Do nothing."""


def serve(job: str, endpoint: str, stop: threading.Event) -> None:
    """Acknowledge until `stop` is set."""
    keys, statistics, rounds = JobKeys(job), IngestStatistics(), KnownRounds()
    with ExitStack() as closing:
        client = closing.enter_context(EtcdClient(EtcdSettings.of(endpoint)))
        consumers = ConsumerThread(
            [], statistics, RowsAhead(lambda: rounds.latest_in_etcd, statistics.count_skipped_rows)
        )
        closing.callback(consumers.close)
        ingest = Ingest(Nowhere(), Admission(rounds, RowRateLimiter()), statistics, consumers)
        closing.callback(ingest.close)
        token = secrets.token_hex(32)
        server = EventServer(ingest, LOOPBACK, 0, token)
        closing.callback(server.stop, _GOODBYE_S)
        record = DaemonRecord(socket.gethostname(), secrets.token_hex(8), LOOPBACK, server.port, token)
        closing.callback(Announcement(client, keys.daemon, record).close)
        stop.wait()


if __name__ == "__main__":
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: is_over.set())
    serve(sys.argv[1], sys.argv[2], is_over)
