"""What 1,250 hosts (10,000 GPUs) ask of one etcd: leases, status values, and commands that must reach all of them.

The hosts are simulated, what they do is not: each has its own lease keeper and watch, as an executor has, and the
settings' periods. Two sides: each host with its own connections, as in production, and all hosts of a process over the
connections of one client, to see what connections alone cost. That no lease is lost is seen by the hosts and, apart
from them, by a watch of their keys.

Run alone on the machine: python -m benchmarks heartbeats [--write] [--hosts N --seconds S]
"""

from __future__ import annotations

import json
import os
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

from benchmarks.bars import must_hold
from benchmarks.heartbeat_hosts import Findings, Orders
from benchmarks.result import Result
from megatrain.config.recovery import RecoveryConfig
from megatrain.contracts.job_keys import JobKeys
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.maintenance import MemberStatus, statuses
from megatrain.coordination.settings import EtcdSettings
from megatrain.coordination.watch import ChangeKind, Changes, Watch
from megatrain.coordination.wire import KeyRange
from tests.helpers.etcd_server import EtcdServers

HOSTS = 1250
SECONDS = 120.0
PROCESSES = 5
COMMAND_S = 10.0
"""Between two commands."""
READY_S = 180.0
SIDES = {"own connections": True, "one client a process": False}
_TICKS = os.sysconf("SC_CLK_TCK")


class Registry:
    """Watches the hosts' keys from outside and counts those that vanish."""

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
    """Measure both sides, one after the other, each on an etcd of its own."""
    recovery = RecoveryConfig()
    rows = [_measure(side, num_hosts, seconds, recovery) for side in SIDES]
    return Result(
        name="heartbeats",
        title=f"{num_hosts:,} hosts on one etcd for {seconds:g} s",
        command="python -m benchmarks heartbeats --write",
        rows=rows,
        notes=[
            "lost leases: seen by the hosts / keys that vanished, seen by a watch apart from them; both must be 0",
            "least left: the shortest time that any lease had left before it would have run out",
            f"commands: one every {COMMAND_S:g} s; `last host` is the time from the put to the last of all hosts",
            f"etcd and {PROCESSES} processes of hosts share the machine, so latencies are upper bounds",
        ],
        settings={
            "ttl_s": recovery.lease_ttl_s,
            "renew_s": recovery.lease_renew_s,
            "status_s": recovery.status_interval_s,
            "processes": PROCESSES,
        },
        beyond_bar=[
            one
            for row in rows
            for one in must_hold(f"{row['side']}: no lease is lost", row["lost leases"] == "0 / 0")
            + must_hold(f"{row['side']}: no write fails", row["failed writes"] == 0)
            + must_hold(f"{row['side']}: all hosts are there at the end", row["hosts at the end"] == num_hosts)
        ],
    )


def _measure(side: str, num_hosts: int, seconds: float, recovery: RecoveryConfig) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        etcd = stack.enter_context(EtcdServers(Path(directory)))
        client = stack.enter_context(EtcdClient(EtcdSettings.of(etcd.urls)))
        orders = Orders(
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
        num_registered = client.read_all(KeyRange.prefix(keys.directory("hosts")), has_values=False).count
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


def _start_hosts(orders: Orders, num_hosts: int, stack: ExitStack) -> list[subprocess.Popen[str]]:
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
    """Return a process's next line; one that says nothing for long is ended, so that the benchmark always ends."""
    assert process.stdout is not None
    timer = threading.Timer(READY_S, process.kill)
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    if not line:
        raise RuntimeError(f"hosts failed {what}")
    return json.loads(line)


def _send_commands(client: EtcdClient, keys: JobKeys, seconds: float) -> dict[str, float]:
    """Put a command now and then for so long; return when each was sent, by its key."""
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
    """Return the seconds that each command took to the last host. Raises: RuntimeError when it did not reach one."""
    seconds = []
    for key, at in sent_at.items():
        heard = [moment for found in findings for moment in found["heard_at"].get(key, [])]
        if len(heard) != num_hosts:
            raise RuntimeError(f"{key} arrived {len(heard)} times at {num_hosts} hosts")
        seconds.append(max(heard) - at)
    return seconds


def _usage(etcd: EtcdServers, client: EtcdClient) -> dict[str, float]:
    """Return what etcd has used so far."""
    process = etcd.members[0].process
    assert process is not None
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    member = next(iter(statuses(client).values()))
    assert isinstance(member, MemberStatus), member
    return {
        "cpu_s": (int(fields[11]) + int(fields[12])) / _TICKS,
        "rss_bytes": int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        "database_bytes": member.database_bytes,
    }


def _num_connections(etcd: EtcdServers) -> int:
    """Return how many TCP connections stand between etcd's port and clients."""
    port = etcd.members[0].client_port
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "01" for line in lines)
