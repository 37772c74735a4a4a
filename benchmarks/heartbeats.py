"""The load of 1,250 hosts (10,000 GPUs) on one etcd: leases, status values, and commands that must reach all hosts.

The hosts are simulated, but their requests are real: each has its own lease keeper and watch, like an executor, and the
default periods. There are two sides: in one, each host has its own connections, as in production; in the other, all
hosts of a process share the connections of one client, which shows the cost of connections. Lost leases are detected by
the hosts and, independently, by a watch of their keys.

Run alone on the machine: python -m benchmarks heartbeats [--write] [--hosts N --seconds S]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.bars import at_least, at_most, must_hold
from benchmarks.heartbeat_hosts import Findings, HeartbeatOrders
from benchmarks.process_usage import cpu_s, resident_mb
from benchmarks.result import Result
from megatrain.config.recovery import RecoveryConfig
from megatrain.contracts.records.job_keys import JobKeys
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.maintenance import status
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.watch import Watch
from megatrain_job.coordination.watch_event import ChangeKind, Changes
from megatrain_job.coordination.wire import KeyRange
from tests.helpers.etcd_server import EtcdServers

HOSTS = 1250
SECONDS = 120.0
PROCESSES = 5
COMMAND_S = 10.0
"""The time between two commands."""
READY_S = 180.0
SIDES = {"own connections": True, "one client a process": False}


class Registry:
    """Watches the hosts' keys independently of the hosts and counts the keys that vanish."""

    def __init__(self, client: EtcdClient, prefix: str) -> None:
        self._watch = Watch(client, KeyRange.prefix(prefix))
        self._thread = threading.Thread(target=self._run)
        self.num_vanished = 0
        self._thread.start()

    def _run(self) -> None:
        for event in self._watch:
            if isinstance(event, Changes):
                self.num_vanished += sum(change.kind is ChangeKind.DELETE for change in event.changes)

    def close(self) -> None:
        self._watch.close()
        self._thread.join()


def run(num_hosts: int = HOSTS, seconds: float = SECONDS) -> Result:
    """Measure both sides, one after the other, each on its own etcd."""
    recovery = RecoveryConfig()
    rows = [_measure(side, num_hosts, seconds, recovery) for side in SIDES]
    return Result(
        name="heartbeats",
        title=f"{num_hosts:,} hosts on one etcd for {seconds:g} s",
        command="python -m benchmarks heartbeats --write",
        rows=rows,
        notes=[
            "lost leases: noticed by the hosts / keys that a separate watch saw vanish; both must be 0",
            "least left: the shortest time that any lease had left before its expiry",
            f"commands: one every {COMMAND_S:g} s; `last host` is the time from the put to the last host",
            f"etcd and {PROCESSES} processes of hosts share the machine, so latencies are upper bounds",
        ],
        settings={
            "ttl_s": recovery.lease_ttl_s,
            "renew_s": recovery.lease_renew_s,
            "status_s": recovery.status_interval_s,
            "processes": PROCESSES,
        },
        bars=[
            bar
            for row in rows
            for bar in (
                must_hold(f"{row['side']}: no lease is lost", row["lost leases"] == "0 / 0"),
                at_most(f"{row['side']}: failed writes", row["failed writes"], 0),
                at_least(f"{row['side']}: hosts that are registered at the end", row["hosts at the end"], num_hosts),
            )
        ],
    )


def _measure(side: str, num_hosts: int, seconds: float, recovery: RecoveryConfig) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        etcd = stack.enter_context(EtcdServers(Path(directory)))
        client = stack.enter_context(EtcdClient(EtcdSettings.of(etcd.urls)))
        orders = HeartbeatOrders(
            endpoint=etcd.urls[0], job="heartbeats", first=0, count=0, has_own_connections=SIDES[side],
            ttl_s=int(recovery.lease_ttl_s), renew_s=recovery.lease_renew_s, status_s=recovery.status_interval_s,
        )  # fmt: skip
        began = time.monotonic()
        processes = _start_hosts(orders, num_hosts, stack)
        start_s = time.monotonic() - began
        keys = JobKeys("heartbeats")
        registry = Registry(client, keys.directory("hosts"))
        stack.callback(registry.close)
        before = _usage(etcd, client)
        sent_at = _send_commands(client, keys, seconds)
        after = _usage(etcd, client)
        num_registered = len(client.read_all(KeyRange.prefix(keys.directory("hosts")), has_values=False).items)
        num_connections = _num_connections(etcd)
        num_vanished = registry.num_vanished
        findings = [_end_hosts(process) for process in processes]
        fan_outs = _fan_outs(sent_at, findings, num_hosts)
        status_ms = sorted(1e3 * one for found in findings for one in found["status_s"])
        return {
            "side": side,
            "connections": num_connections,
            "hosts at the end": num_registered,
            "lost leases": f"{sum(found['lost'] for found in findings)} / {num_vanished}",
            "late renewals": sum(found["doubts"] for found in findings),
            "least left s": min(found["least_left_s"] for found in findings),
            "failed writes": sum(found["status_failures"] for found in findings),
            "writes/s": len(status_ms) / seconds,
            "write p50 ms": statistics.median(status_ms),
            "write p99 ms": status_ms[int(0.99 * len(status_ms))],
            "last host, median s": statistics.median(fan_outs),
            "last host, worst s": max(fan_outs),
            "etcd cores": (after["cpu_s"] - before["cpu_s"]) / seconds,
            "etcd MiB": after["rss_bytes"] / 2**20,
            "database MB/h": (after["database_bytes"] - before["database_bytes"]) / 1e6 / seconds * 3600,
            "start of all s": start_s,
        }


def _start_hosts(orders: HeartbeatOrders, num_hosts: int, stack: ExitStack) -> list[subprocess.Popen[str]]:
    """Start the processes and wait until all hosts are registered."""
    processes = []
    for number in range(PROCESSES):
        first, end = (num_hosts * (number + part) // PROCESSES for part in (0, 1))
        process = stack.enter_context(_process())
        assert process.stdin is not None
        process.stdin.write(json.dumps({**orders, "first": first, "count": end - first}) + "\n")
        process.stdin.flush()
        processes.append(process)
    for process in processes:
        _answer(process, "to be ready")
    return processes


@contextmanager
def _process() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.heartbeat_hosts"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _end_hosts(process: subprocess.Popen[str]) -> Findings:
    assert process.stdin is not None
    process.stdin.write("end\n")
    process.stdin.flush()
    found: Findings = _answer(process, "to end")
    return found


def _answer(process: subprocess.Popen[str], what: str) -> Any:
    """Return the next line of a process. A process that is silent for too long is killed, so the benchmark ends."""
    assert process.stdout is not None
    timer = threading.Timer(READY_S, process.kill)
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    if not line:
        raise RuntimeError(f"hosts failed {what}")
    return json.loads(line)


def _send_commands(client: EtcdClient, keys: JobKeys, seconds: float) -> dict[str, float]:
    """Put a command every COMMAND_S for `seconds`; return when each was sent, by its key."""
    sent_at: dict[str, float] = {}
    end = time.monotonic() + seconds
    number = 0
    while (left_s := end - time.monotonic()) > 0:
        time.sleep(min(COMMAND_S, left_s) / 2)
        if left_s > COMMAND_S / 2:
            number += 1
            key = f"{keys.directory('commands')}{number:06d}"
            sent_at[key] = time.monotonic()
            client.put(key, json.dumps({"kind": "checkpoint", "number": number}))
        time.sleep(max(min(COMMAND_S / 2, end - time.monotonic()), 0.0))
    return sent_at


def _fan_outs(sent_at: dict[str, float], findings: list[Findings], num_hosts: int) -> list[float]:
    """Return for each command the seconds until the last host had it. Raises: RuntimeError when a host missed one."""
    seconds = []
    for key, at in sent_at.items():
        heard = [moment for found in findings for moment in found["heard_at"].get(key, [])]
        if len(heard) != num_hosts:
            raise RuntimeError(f"{key} arrived {len(heard)} times at {num_hosts} hosts")
        seconds.append(max(heard) - at)
    return seconds


def _usage(etcd: EtcdServers, client: EtcdClient) -> dict[str, float]:
    """Return etcd's use of processor, memory and disk so far."""
    process = etcd.members[0].process
    assert process is not None
    member = status(client, client.settings.endpoints[0])
    return {
        "cpu_s": cpu_s(process.pid),
        "rss_bytes": 1e6 * resident_mb(process.pid),
        "database_bytes": member.database_bytes,
    }


def _num_connections(etcd: EtcdServers) -> int:
    """Return the number of TCP connections between etcd's port and its clients."""
    port = etcd.members[0].client_port
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "01" for line in lines)
