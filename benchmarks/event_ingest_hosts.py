"""The hosts of the ingest benchmark: one process that streams prepared rows at a steady rate, like many hosts.

It reads its orders as one line of JSON, reports when it is ready, starts at the next line, and writes its result.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.records.job_keys import JobKeys
from megatrain_diagnostics.events.tables import Spans, from_columns
from megatrain_diagnostics.wire.discovery import WatchedDaemon
from megatrain_diagnostics.wire.sender import Sender, SenderLimits
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings

RANKS_A_HOST = 8
_FULL_BYTES = 12 << 20
"""A host without a rate waits while it has this many bytes in memory and in flight."""
_LAST_ACKNOWLEDGMENT_S = 60.0


class IngestOrders(TypedDict):
    endpoint: str
    job: str
    directory: str
    num_hosts: int
    batch_rows: int
    rows_per_s: float
    """The rate of all hosts together; 0: as fast as rows are acknowledged."""
    seconds: float


def main() -> int:
    orders: IngestOrders = json.loads(sys.stdin.readline())
    with ExitStack() as closing:
        client = closing.enter_context(EtcdClient(EtcdSettings.of(orders["endpoint"])))
        finder = WatchedDaemon(client, JobKeys(orders["job"]))
        closing.callback(finder.close)
        limits = SenderLimits(memory_bytes=64 << 20, window_bytes=16 << 20)
        senders = [
            Sender(f"host-{number}", finder, Path(orders["directory"]) / f"host-{number}", limits)
            for number in range(orders["num_hosts"])
        ]
        tables = [made_rows(number * RANKS_A_HOST, orders["batch_rows"]) for number in range(len(senders))]
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(_stream(orders, senders, tables)), flush=True)
    return 0


def made_rows(first_rank: int, num_rows: int) -> Spans:
    """Return rows like those of eight ranks of a host: operations in turn, with noise on their durations."""
    generator = np.random.default_rng(first_rank)
    numbers = np.arange(num_rows)
    operations = [operation.number for operation in Operation][1:12]
    columns: dict[str, Any] = {
        "round": np.zeros(num_rows),
        "rank": first_rank + numbers % RANKS_A_HOST,
        "sequence": numbers,
        "step": numbers // 1000,
        "operation": np.array(operations)[numbers % len(operations)],
        "microbatch": numbers // 8 % 32,
        "chunk": numbers // 64 % 6,
        "group": numbers % 5,
        "collective": numbers,
        "start_ns": numbers * 10_000,
        "duration_ns": generator.integers(900_000, 1_100_000, num_rows),
        "launch_ns": numbers * 10_000,
        "num_bytes": np.full(num_rows, 1 << 20),
        "flags": np.zeros(num_rows),
    }
    return from_columns(Spans, columns)


def _stream(orders: IngestOrders, senders: list[Sender], tables: list[Spans]) -> dict[str, Any]:
    began, cpu = time.monotonic(), time.process_time()
    num_batches = 0
    for number in _turns(orders, senders, began):
        table = tables[number]
        shift = num_batches // len(senders) * orders["batch_rows"]
        times = table.start_ns + time.time_ns()
        senders[number].send(Spans, replace(table, sequence=table.sequence + shift, start_ns=times, launch_ns=times))
        num_batches += 1
    sent_s = time.monotonic() - began
    is_all_acknowledged = all(sender.flush(_LAST_ACKNOWLEDGMENT_S) for sender in senders)
    acknowledged_s = time.monotonic() - began
    for sender in senders:
        sender.close()
    states = [sender.state().outbox for sender in senders]
    return {
        "rows": num_batches * orders["batch_rows"],
        "batches": num_batches,
        "sent_s": sent_s,
        "acknowledged_s": acknowledged_s,
        "is_all_acknowledged": is_all_acknowledged,
        "dropped_rows": sum(state.dropped_rows for state in states),
        "cpu_s": time.process_time() - cpu,
    }


def _turns(orders: IngestOrders, senders: list[Sender], began: float) -> Iterator[int]:
    """Yield the number of the host that sends next, whenever a batch is due."""
    num_batches = 0
    while (elapsed_s := time.monotonic() - began) < orders["seconds"]:
        if orders["rows_per_s"]:
            is_time = num_batches * orders["batch_rows"] <= elapsed_s * orders["rows_per_s"]
        else:
            state = senders[num_batches % len(senders)].state().outbox
            is_time = state.memory_bytes + state.in_flight_bytes < _FULL_BYTES
        if is_time:
            yield num_batches % len(senders)
            num_batches += 1
        else:
            time.sleep(0.001)


if __name__ == "__main__":
    sys.exit(main())
