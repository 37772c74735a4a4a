"""Whole hosts are suspended and resume later: the job has continued with a spare, and nothing they do has an effect.

A frozen host keeps everything that it held: its locks, its connections, its unfinished writes.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.incident import IncidentKind, IncidentState
from tests.helpers.processes import descendants
from tests.helpers.recovery_checks import ENDLESS, HOSTS, STEPS, RunningJob, running_job
from tests.helpers.waiting import wait_until

SPARE = "host-2"
SHORT_LEASE = {"recovery": {"lease_ttl_s": 4, "lease_renew_s": 1.0}}


def processes_of(running: RunningJob, host: str) -> list[int]:
    """Return all processes of a host: its executor with its workers, and detached processes such as writers."""
    executor = running.launched.executors[host].pid
    return [executor, *descendants(executor), *running.writers(host)]


def test_frozen_hosts_are_replaced_and_a_thaw_changes_nothing(
    tmp_path: Path, undisturbed_losses: dict[int, float]
) -> None:
    """First a host that does not drive, then the driver's host: the thawed host is the spare that replaces it."""
    with running_job(tmp_path, SHORT_LEASE, {"train": {"steps": ENDLESS}}, spare=SPARE, pace_s=0.2) as running:
        running.launched.wait_for_step(8)
        for number, is_driver in enumerate((False, True)):
            driver = running.view.driver()
            training = [part.host for part in running.view.rounds()[-1].hosts]
            check_freeze(running, driver if is_driver else next(host for host in training if host != driver), number)
        assert len(running.view.incidents()) == 2
        running.save_and_stop()
        running.check_first_losses(undisturbed_losses)
        running.check_history()
        running.check_nothing_left()


def check_freeze(running: RunningJob, host: str, number: int) -> None:
    """Freeze a host until the job has recovered, which is incident `number`; wait until the host is a spare."""
    assert host in [part.host for part in running.view.rounds()[-1].hosts]
    frozen = processes_of(running, host)
    struck = time.time()
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: len(running.view.rounds()) == number + 2, "the round with the spare")
        assert host not in [part.host for part in running.view.rounds()[-1].hosts]
        incident = running.view.wait_recovered(number)
    finally:
        for pid in frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert (incident.kind, incident.culprit_hosts) == (IncidentKind.HOST_LOST, (host,))
    assert incident.state is IncidentState.RECOVERED
    assert incident.moments.first_step is not None
    print(f"{host}: next step after {incident.moments.first_step - struck:.1f} s")

    def is_spare() -> bool:
        status = running.view.statuses().get(host)
        return status is not None and status.phase is HostPhase.PARKED

    wait_until(is_spare, "the thawed host as a spare")


@pytest.mark.slow
def test_training_without_etcd_stops_in_time_and_resumes(tmp_path: Path, undisturbed_losses: dict[int, float]) -> None:
    """All hosts complete steps all the time: the limit is on the time without a lease."""
    short = {
        "recovery": {"lease_ttl_s": 4, "lease_renew_s": 1.0, "hang_floor_s": 1.0, "join_timeout_s": 12.0},
        "runtime": {"save_grace_s": 3.0},
        "train": {"steps": STEPS + 20},
    }
    with running_job(tmp_path, short, nnodes="1:2", pace_s=0.5) as running:
        running.launched.wait_for_step(4)
        (member,) = running.etcd.members
        member.kill()
        log = running.launched.log
        wait_until(lambda: all("save and stop" in log(host) for host in HOSTS), "the limit")
        wait_until(lambda: not running.pids("mt-rank-0"), "the end of the workers")
        stopped_at = max(running.launched.losses())
        assert 8 < stopped_at < STEPS + 15
        assert all(running.launched.executors[host].poll() is None for host in HOSTS)
        member.start()
        running.etcd.wait_ready()
        assert running.finish() == 0
        # The next round began from what was saved.
        incident = running.only_incident()
        assert (incident.state, incident.steps_lost) == (IncidentState.RECOVERED, 0)
        assert incident.resumed_step == stopped_at
        running.check_history()
        running.check_first_losses(undisturbed_losses)
