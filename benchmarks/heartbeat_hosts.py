"""Many simulated hosts in one process. Each uses etcd like an executor: a lease, status values, a watch of commands.

`benchmarks.heartbeats` starts this process and exchanges lines of JSON with it. The process reads its orders, reports
when all hosts are registered, runs until the next line arrives, and answers with its findings.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any, TypedDict

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.host_records import HostPhase, HostStatus
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.lease_keeper import LeaseKeeper, LeaseState
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.watch import Watch
from megatrain_job.coordination.watch_event import Changes
from megatrain_job.coordination.wire import KeyRange

_STACK_BYTES = 256 << 10
_POLL_S = 0.5
_WRITERS = 4


class HeartbeatOrders(TypedDict):
    """The settings of a process of hosts."""

    endpoint: str
    job: str
    first: int
    count: int
    has_own_connections: bool
    ttl_s: int
    renew_s: float
    status_s: float


class Findings(TypedDict):
    """The findings of a process of hosts."""

    lost: int
    """Hosts whose lease was lost at any time."""
    doubts: int
    """How often a lease was not renewed within its TTL."""
    least_left_s: float
    """The shortest remaining time of any lease."""
    status_failures: int
    status_s: list[float]
    """The duration of each write."""
    heard_at: dict[str, list[float]]
    """By key of a command, when it arrived: one entry for each host."""


class BenchmarkHost:
    """One host, registered under its lease, with a watch of the commands."""

    def __init__(self, orders: HeartbeatOrders, number: int, client: EtcdClient, hosts: BenchmarkHosts) -> None:
        self.name = f"host-{number}"
        self.client = client
        self.step = 0
        self._hosts = hosts
        self._keys = JobKeys(orders["job"])
        self.keeper = LeaseKeeper(client, ttl_s=orders["ttl_s"], period_s=orders["renew_s"], on_change=hosts.note_lease)
        client.put(f"{self._keys.directory('hosts')}{self.name}", self._status(), lease_id=self.keeper.lease_id)
        self.watch = Watch(client, KeyRange.prefix(self._keys.directory("commands")))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def write_status(self) -> None:
        self.step += 50
        key = f"{self._keys.directory('status')}{self.name}"
        self.client.put(key, self._status(), lease_id=self.keeper.lease_id)

    def close(self) -> None:
        self.watch.close()
        self._thread.join()
        self.keeper.close(is_revoked=False)

    def _status(self) -> bytes:
        now_s = time.time()
        return encode(
            HostStatus(
                host=self.name, session="5f0e9d1c7b3a4826", phase=HostPhase.RUNNING, round=1, alive_ranks="ff",
                min_step=self.step, max_step=self.step + 1, last_step_unix_s=now_s, median_step_s=4.1,
                step_phase="forward-compute",
            )
        )  # fmt: skip

    def _listen(self) -> None:
        for event in self.watch:
            if isinstance(event, Changes):
                at = time.monotonic()
                for change in event.changes:
                    self._hosts.note_command(change.item.key.decode(), at)


class BenchmarkHosts:
    """All hosts of this process, and their findings."""

    def __init__(self, orders: HeartbeatOrders) -> None:
        self._orders = orders
        self._lock = threading.Lock()
        self._doubts = 0
        self._least_left_s = float(orders["ttl_s"])
        self._status_s: list[float] = []
        self._status_failures = 0
        self._heard_at: defaultdict[str, list[float]] = defaultdict(list)
        self._closed = threading.Event()
        self._stack = ExitStack()
        self._hosts: list[BenchmarkHost] = []
        settings = EtcdSettings.of(orders["endpoint"])
        shared = None if orders["has_own_connections"] else self._stack.enter_context(EtcdClient(settings))
        for number in range(orders["first"], orders["first"] + orders["count"]):
            client = shared or self._stack.enter_context(EtcdClient(settings))
            self._hosts.append(BenchmarkHost(orders, number, client, self))
        shares = [self._hosts[number::_WRITERS] for number in range(_WRITERS)]
        self._threads = [threading.Thread(target=self._write, args=(share,)) for share in shares]
        self._threads.append(threading.Thread(target=self._poll))
        for thread in self._threads:
            thread.start()

    def note_lease(self, state: LeaseState) -> None:
        with self._lock:
            self._doubts += state is LeaseState.DOUBTFUL

    def note_command(self, key: str, at: float) -> None:
        with self._lock:
            self._heard_at[key].append(at)

    def close(self) -> Findings:
        self._closed.set()
        for thread in self._threads:
            thread.join()
        lost = sum(host.keeper.state is LeaseState.LOST for host in self._hosts)
        self._poll_once()
        for host in self._hosts:
            host.close()
        self._stack.close()
        return Findings(
            lost=lost, doubts=self._doubts, least_left_s=self._least_left_s, status_failures=self._status_failures,
            status_s=self._status_s, heard_at=dict(self._heard_at),
        )  # fmt: skip

    def _write(self, hosts: list[BenchmarkHost]) -> None:
        """Write the status of each of these hosts once a period. The writes are spread over the period."""
        period_s = self._orders["status_s"]
        randomness = random.Random(hosts[0].name if hosts else 0)
        due = sorted((time.monotonic() + randomness.uniform(0, period_s), index) for index in range(len(hosts)))
        while due and not self._closed.wait(max(due[0][0] - time.monotonic(), 0.0)):
            at, index = due.pop(0)
            began = time.monotonic()
            try:
                hosts[index].write_status()
            except CoordinationError:
                with self._lock:
                    self._status_failures += 1
            with self._lock:
                self._status_s.append(time.monotonic() - began)
            due.append((at + period_s, index))

    def _poll(self) -> None:
        while not self._closed.wait(_POLL_S):
            self._poll_once()

    def _poll_once(self) -> None:
        self._least_left_s = min(self._least_left_s, *(host.keeper.valid_s for host in self._hosts))


def main() -> None:
    threading.stack_size(_STACK_BYTES)
    orders: HeartbeatOrders = json.loads(sys.stdin.readline())
    hosts = BenchmarkHosts(orders)
    _answer({"ready": orders["count"]})
    sys.stdin.readline()
    _answer(hosts.close())


def _answer(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
