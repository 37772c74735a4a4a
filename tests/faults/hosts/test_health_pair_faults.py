"""Pair tests whose partner is absent, or disappears during the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from torch.distributed import TCPStore

from megatrain.contracts.records.host_records import CheckOutcome, CheckResult, HostRecord
from megatrain_launcher.health.pair_test import PairTask, pair_task, run_pair
from tests.helpers.waiting import DEADLINE_S

PARTNER = """
import signal, sys
from datetime import timedelta
from tests.helpers.waiting import DEADLINE_S
import torch.distributed as dist
store = dist.PrefixStore(sys.argv[2], dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False))
dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=timedelta(seconds=DEADLINE_S))
print("met", flush=True)
signal.pause()
"""


def record(host: str, port: int) -> HostRecord:
    return HostRecord(host, f"s-{host}", 1, "127.0.0.1", port, 0, 1, "", "", "", 0.0, True)


def task_of(store: TCPStore, timeout_s: float) -> PairTask:
    first, second = record("host-1", store.port), record("host-2", 1)
    return pair_task(first, second, 1, device="cpu", network_interface="lo", timeout_s=timeout_s)


def test_a_partner_that_never_comes() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    result = run_pair(task_of(store, 1.0), dict(os.environ))
    assert result.outcome is CheckOutcome.WARNING
    assert "compute" in result.parts_s
    assert "reduce" not in result.parts_s
    assert "DistStoreError" in result.detail


def test_no_store_where_it_should_be() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    task = task_of(store, 1.0)
    del store
    result = run_pair(task, dict(os.environ))
    assert result.outcome is CheckOutcome.WARNING
    assert "failed" in result.detail


def test_a_partner_that_is_killed_after_meeting() -> None:
    """The partner answers at the store as gloo does, then is killed: the survivor reports it within its time limit."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    task = task_of(store, 8.0)
    partner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PARTNER,
            str(store.port),
            task.prefix,
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    results: list[CheckResult] = []
    thread = threading.Thread(target=lambda: results.append(run_pair(task, dict(os.environ))))
    try:
        thread.start()
        assert partner.stdout is not None
        assert partner.stdout.readline() == b"met\n"
        partner.send_signal(signal.SIGKILL)
        thread.join(DEADLINE_S)
    finally:
        partner.kill()
        partner.wait()
        partner.stdout.close()
        thread.join()
    assert results[0].outcome is CheckOutcome.WARNING
    assert "RuntimeError" in results[0].detail
    assert "reduce" not in results[0].parts_s
    store.set("other", "value")
    assert store.get("other") == b"value"  # The executor's store still works.
