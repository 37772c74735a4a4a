"""A million events a second for a minute, streamed by hosts into the store and acknowledged when they are on disk.

The daemon is the real one with its checks. etcd and one process that simulates all hosts run beside it; the rows are
made beforehand. The peer is a minimal program with the same libraries: a Flight DoPut of bare batches, written to
Parquet and synced. It has no token, checks no rows, numbers no batches and does not bound its memory.

Run alone on the machine: python -m benchmarks event_ingest [--write] [--ingest-seconds S]
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.dataset

from benchmarks.bars import at_least, must_hold
from benchmarks.event_ingest_hosts import RANKS_A_HOST, IngestOrders
from benchmarks.process_usage import cpu_s, peak_resident_mb
from benchmarks.result import Result
from megatrain.contracts.records.job_keys import JobKeys
from megatrain_diagnostics.store.segments import not_superseded
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from tests.helpers.etcd_server import EtcdServers

SECONDS = 60.0
RATE = 1_000_000
HOSTS = 16
JOB = "ingest"
_READY_S = 60.0
_END_S = 200.0


def run(seconds: float = SECONDS) -> Result:
    """Measure the steady rate with two batch sizes, and then the greatest rates of megatrain and of the peer."""
    rows = [
        _ours("steady, 8,192 rows a batch", seconds, 8192, RATE),
        _ours("steady, 1,024 rows a batch", seconds / 4, 1024, RATE),
        _ours("as fast as acknowledged", seconds / 4, 8192, 0),
        _peer("peer: bare Flight to Parquet", seconds / 4, 8192),
    ]
    return Result(
        name="event-ingest",
        title=f"Events from {HOSTS} hosts into the store",
        command="python -m benchmarks event_ingest --write",
        rows=rows,
        notes=[
            "million rows/s: rows / time from the first row sent to the last acknowledgment, after the sync to disk",
            "stored: rows counted in the Parquet files afterwards, by another library's reader",
            "lag: time from the last row sent to the last acknowledgment",
            "daemon MB: its peak resident memory",
            "cores: used by the daemon, and by the process that simulates all hosts, on the same machine",
            f"{HOSTS} streams of {RANKS_A_HOST} ranks each, rows of 14 columns (spans); the peer has one stream",
        ],
        settings={"seconds": seconds, "rows_per_s": RATE},
        bars=[
            at_least(f"{rows[0]['side']}, million rows/s", rows[0]["million rows/s"], 0.97 * RATE / 1e6),
            *(
                must_hold(
                    f"{row['side']}: all rows are stored and none is dropped",
                    row["stored"] == row["rows"] and not row["dropped"],
                )
                for row in rows[:3]
            ),
        ],
    )


def _ours(side: str, seconds: float, batch_rows: int, rate: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory, EtcdServers(Path(directory)) as etcd:
        place = Path(directory)
        with _daemon(place / "run", etcd.urls[0]) as daemon:
            _wait_for_record(EtcdSettings.of(etcd.urls))
            orders = IngestOrders(
                endpoint=etcd.urls[0], job=JOB, directory=str(place / "spools"), num_hosts=HOSTS, batch_rows=batch_rows,
                rows_per_s=rate, seconds=seconds,
            )  # fmt: skip
            before = cpu_s(daemon.pid)
            found = _hosts("benchmarks.event_ingest_hosts", orders)
            daemon_cpu_s = cpu_s(daemon.pid) - before
            daemon_mb = peak_resident_mb(daemon.pid)
        stored = _num_stored(place / "run" / "events" / "spans")
        if not found["is_all_acknowledged"]:
            raise RuntimeError(f"{side}: not everything was acknowledged: {found}")
    return _row(side, found, daemon_cpu_s, daemon_mb, stored)


def _peer(side: str, seconds: float, batch_rows: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        found = _hosts(
            "benchmarks.event_ingest_peer", {"directory": directory, "batch_rows": batch_rows, "seconds": seconds}
        )
        return _row(side, found, found["server_cpu_s"], found["server_mb"], _num_stored(Path(directory)))


def _row(side: str, found: dict[str, Any], daemon_cpu_s: float, daemon_mb: float, stored: int) -> dict[str, Any]:
    seconds = found["acknowledged_s"]
    return {
        "side": side,
        "s": seconds,
        "million rows/s": found["rows"] / seconds / 1e6,
        "rows": found["rows"],
        "stored": stored,
        "dropped": found["dropped_rows"],
        "batches/s": found["batches"] / seconds,
        "lag s": seconds - found["sent_s"],
        "daemon cores": daemon_cpu_s / seconds,
        "daemon MB": daemon_mb,
        "hosts cores": found["cpu_s"] / seconds,
    }


@contextmanager
def _daemon(run: Path, endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    run.mkdir()
    arguments = ["--run", str(run), "--job", JOB, "--rdzv-endpoint", endpoint]
    with (run / "daemon.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "megatrain_diagnostics.daemon", *arguments], stderr=log)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(_READY_S)
    finally:
        process.kill()
        process.wait()
        sys.stderr.write((run / "daemon.log").read_text())


def _wait_for_record(settings: EtcdSettings) -> None:
    with EtcdClient(settings) as client:
        never = threading.Event()
        while client.get(JobKeys(JOB).daemon) is None:
            never.wait(0.1)


def _hosts(module: str, orders: Any) -> dict[str, Any]:
    process = subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(orders["seconds"] + _END_S, process.kill)
    timer.start()
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(orders), file=process.stdin, flush=True)
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError(f"{module} did not start")
        print("go", file=process.stdin, flush=True)
        found: dict[str, Any] = json.loads(process.stdout.readline())
        process.communicate(timeout=_READY_S)
        return found
    finally:
        timer.cancel()
        process.kill()
        process.wait()


def _num_stored(directory: Path) -> int:
    # the daemon keeps merged segments for a minute, for readers that have already listed them
    files = [str(path) for path in not_superseded(list(directory.rglob("*.parquet")))]
    return int(pyarrow.dataset.dataset(files, format="parquet").count_rows())
