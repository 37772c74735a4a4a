"""Storage of a host does not answer: training waits, no rank counts as hung, and training continues with the same
losses.

A frozen checkpoint writer stands for the storage: the ranks see the same effect, snapshots that are not stored.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.records.incident import IncidentKind, IncidentState
from megatrain.contracts.records.rounds import Cordon
from megatrain_job.failures.verdict import Label
from megatrain_job.jobs.assessment import assess
from megatrain_job.jobs.health import ReasonCode
from megatrain_job.jobs.snapshot import read_job
from tests.helpers.recovery_checks import HOSTS, RunningJob, running_job
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.slow

INTERVAL = 10


def changes(timeout_s: float) -> dict[str, dict[str, Any]]:
    return {
        "checkpoint": {"interval": INTERVAL},
        "recovery": {"hang_floor_s": 2.0},
        "runtime": {"checkpoint_timeout_s": timeout_s},
    }


def writer_log(running: RunningJob) -> str:
    path = running.job.files.logs / "checkpoint-writer.log"
    return path.read_text() if path.exists() else ""


def started_writers(running: RunningJob) -> dict[str, int]:
    """Return the processes of the hosts' checkpoint writers, as their log names them."""
    found = re.findall(r"checkpoint writer (\d+): writer of \S+\.(host-\d) started", writer_log(running))
    return {host: int(pid) for pid, host in found}


@contextmanager
def storage_hangs(running: RunningJob, hosts: tuple[str, ...]) -> Iterator[None]:
    """Freeze the checkpoint writers of hosts before the first snapshot is stored."""
    wait_until(lambda: set(hosts) <= set(started_writers(running)), "the writers")
    writers = [started_writers(running)[host] for host in hosts]
    for pid in writers:
        os.kill(pid, signal.SIGSTOP)
    assert "committed" not in writer_log(running)
    try:
        yield
    finally:
        for pid in writers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_ranks_that_wait_for_storage_do_not_hang(tmp_path: Path, undisturbed_losses: dict[int, float]) -> None:
    with running_job(tmp_path, changes(200.0)) as running:

        def waits_in_a_snapshot() -> bool:
            job = read_job(running.view.client, running.view.keys)
            reasons = assess(job, time.time()).health.reasons
            assert ReasonCode.STEP_LATE not in [reason.code for reason in reasons]
            return any(
                reason.code is ReasonCode.SAVE_LATE and "waits in a snapshot" in reason.text for reason in reasons
            )

        with storage_hangs(running, HOSTS[1:]):
            wait_until(waits_in_a_snapshot, "the reason")
        assert running.finish() == 0
        assert running.view.incidents() == []
        assert len(running.view.rounds()) == 1
        assert running.launched.losses() == undisturbed_losses
        running.check_nothing_left()


def test_storage_of_one_host_that_hangs_costs_one_checkpoint(
    tmp_path: Path, undisturbed_losses: dict[int, float]
) -> None:
    """The other hosts' writers abandon its snapshots after half of the limit, and training continues without them."""
    with running_job(tmp_path, changes(20.0)) as running:
        with storage_hangs(running, HOSTS[1:]):
            running.launched.wait_for_step(3 * INTERVAL + 1)
            assert f"step {INTERVAL}: not saved" in writer_log(running)
        assert running.finish() == 0
        assert running.view.incidents() == []
        assert running.launched.losses() == undisturbed_losses
        running.check_nothing_left()


def test_storage_down_on_all_hosts_breaks_the_round_blames_none(
    tmp_path: Path, undisturbed_losses: dict[int, float]
) -> None:
    with running_job(tmp_path, changes(8.0)) as running:
        with storage_hangs(running, HOSTS):
            wait_until(lambda: len(running.view.rounds()) == 2, "the next round")
        assert running.finish() == 0
        incident = running.only_incident()
        assert (incident.kind, incident.state) == (IncidentKind.FAILURE, IncidentState.RECOVERED)
        assert (incident.label, incident.action) == (Label.STORAGE, "restart")
        assert "its snapshot is not in storage after 8 s" in incident.reason
        assert running.view.all("cordons", Cordon) == []
        assert running.launched.losses() == undisturbed_losses
        running.check_nothing_left()
