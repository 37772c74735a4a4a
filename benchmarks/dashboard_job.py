"""A simulated running job of 12,288 ranks on 1,536 hosts in etcd. Its statuses change as often as in a real job."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.config.recovery import RecoveryConfig
from megatrain.contracts.records.host_records import HostPhase, HostRecord, HostStatus
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import JobRecord, Round, RoundHost
from megatrain_job.coordination.client import EtcdClient

KEYS = JobKeys("largest")
NUM_HOSTS = 1536
_WORKERS = 8
_STEP_S = 6.3
"""The step time of MegaScale's 175B model on 12,288 GPUs (Table 2)."""


def write_job(client: EtcdClient, run_directory: str) -> None:
    """Write the records of a job that trains."""
    now_s = time.time()
    record = JobRecord(KEYS.job, "launch", "hash", {}, NUM_HOSTS, NUM_HOSTS, _WORKERS, run_directory, "host-0", now_s)
    client.put(KEYS.record, encode(record))
    parts = tuple(
        RoundHost(_name(host), f"s{host}", _address(host), host * _WORKERS, _WORKERS) for host in range(NUM_HOSTS)
    )
    round_ = Round(1, NUM_HOSTS * _WORKERS, parts, _address(0), 29400, "the job begins", "host-0", now_s)
    client.put(KEYS.round(1), encode(round_))
    client.put(f"{KEYS.election}/leader", b"host-0", lease_id=client.grant_lease(24 * 3600).lease_id)
    for host in range(NUM_HOSTS):
        record_of_host = HostRecord(
            _name(host), f"s{host}", 100, _address(host), 29400, 29500, _WORKERS, "hash", "0.1.0", "8 GPUs", now_s, True
        )
        client.put(KEYS.host(_name(host)), encode(record_of_host))
        put_status(client, host, 100)


def put_status(client: EtcdClient, host: int, step: int) -> None:
    """Write that a host has completed this step; the job has completed the lowest step of all hosts."""
    client.put(KEYS.status(_name(host)), encode(_status(host, step, time.time())))


@contextmanager
def changing_statuses(client: EtcdClient) -> Iterator[None]:
    """Write the statuses of the hosts during the block, one after the other, as often as executors do."""
    is_over = threading.Event()
    pause_s = RecoveryConfig().status_interval_s / NUM_HOSTS

    def write() -> None:
        began_s, number = time.monotonic(), 0
        while not is_over.wait(max(0.0, began_s + number * pause_s - time.monotonic())):
            step = 100 + int((time.monotonic() - began_s) / _STEP_S)
            put_status(client, number % NUM_HOSTS, step)
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _status(host: int, step: int, now_s: float) -> HostStatus:
    return HostStatus(
        _name(host), f"s{host}", HostPhase.RUNNING, 1, "ff", step, step, 0, now_s, _STEP_S, "step",
    )  # fmt: skip


def _name(host: int) -> str:
    return f"host-{host:04d}"


def _address(host: int) -> str:
    return f"10.{host // 250}.{host % 250}.1"
