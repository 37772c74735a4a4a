"""The peer of the ingest benchmark: a bare Flight DoPut that writes batches to Parquet, one synced file a million rows.

It has two processes, like megatrain's side: this one serves, and a child sends as fast as batches are acknowledged. It
reads its orders as one line of JSON, reports when it is ready, starts at the next line, and writes its result.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq

from benchmarks.event_ingest_hosts import made_rows
from benchmarks.process_usage import peak_resident_mb
from megatrain_diagnostics.columns.schema import to_arrow

_FILE_ROWS = 1_000_000
_IN_FLIGHT = 256
"""Batches in flight: 150 MB of spans, about half of the windows of all hosts of megatrain's side."""


class _PeerServer(flight.FlightServerBase):
    def __init__(self, directory: Path) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._directory, self._num_files = directory, 0

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        held: list[pa.RecordBatch] = []
        num_rows = 0
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                self._write(held, writer)
                return
            held.append(chunk.data)
            num_rows += chunk.data.num_rows
            if num_rows >= _FILE_ROWS:
                self._write(held, writer)
                held, num_rows = [], 0

    def _write(self, batches: list[pa.RecordBatch], writer: Any) -> None:
        if not batches:
            return
        path = self._directory / f"{self._num_files}.parquet"
        self._num_files += 1
        with path.open("wb") as file:
            pq.write_table(pa.Table.from_batches(batches), file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        writer.write(pa.py_buffer(str(len(batches)).encode()))


def _send(port: int, batch_rows: int, seconds: float, answers: Any) -> None:
    batch = to_arrow(made_rows(0, batch_rows))
    client = flight.connect(f"grpc://127.0.0.1:{port}")
    answers.put("ready")
    writer, reader = client.do_put(flight.FlightDescriptor.for_command(b"peer"), batch.schema)
    semaphore = threading.Semaphore(_IN_FLIGHT)
    done = threading.Event()

    def listen() -> None:
        while (answer := reader.read()) is not None:
            semaphore.release(int(answer.to_pybytes()))
        done.set()

    threading.Thread(target=listen, daemon=True).start()
    began, cpu, num_batches = time.monotonic(), time.process_time(), 0
    while time.monotonic() - began < seconds:
        semaphore.acquire()
        writer.write_batch(batch)
        num_batches += 1
    sent_s = time.monotonic() - began
    writer.done_writing()
    done.wait()
    answers.put(
        {
            "rows": num_batches * batch_rows,
            "batches": num_batches,
            "sent_s": sent_s,
            "acknowledged_s": time.monotonic() - began,
            "dropped_rows": 0,
            "cpu_s": time.process_time() - cpu,
        }
    )


def main() -> int:
    orders = json.loads(sys.stdin.readline())
    server = _PeerServer(Path(orders["directory"]))
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    print("ready", flush=True)
    sys.stdin.readline()
    child = context.Process(target=_send, args=(server.port, orders["batch_rows"], orders["seconds"], answers))
    child.start()
    answers.get()
    cpu = time.process_time()
    found = answers.get()
    server_figures = {"server_cpu_s": time.process_time() - cpu, "server_mb": peak_resident_mb(os.getpid())}
    print(json.dumps(found | server_figures), flush=True)
    child.join()
    server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
