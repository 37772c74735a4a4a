"""Faults of hosts: executors are killed or stopped, with or without a spare, and so is the standby server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState
from tests.helpers.recovery_checks import ENDLESS, HOSTS, INTERVAL, STEPS, RunningJob, running_job
from tests.helpers.waiting import wait_until

SPARE = "host-2"
TTL_S = 4
SHORT_LEASE = {"recovery": {"lease_ttl_s": TTL_S, "lease_renew_s": 1.0}}


def finish_living(running: RunningJob) -> None:
    living = [host for host, process in running.launched.executors.items() if process.poll() is None]
    assert running.finish(living) == 0


def check_all(running: RunningJob, undisturbed_losses: dict[int, float]) -> None:
    assert running.launched.losses() == undisturbed_losses
    assert len(undisturbed_losses) == STEPS
    running.check_history()
    running.check_nothing_left()


def saved_step(running: RunningJob) -> int:
    """Return the step of the newest snapshot that all ranks have sealed, as the trainer reports it."""
    text = "".join(running.launched.log(host) for host in HOSTS)
    return max(step for step in range(0, STEPS, INTERVAL) if step == 0 or f"snapshot of step {step} taken" in text)


def test_host_with_a_killed_executor_is_replaced_by_the_spare(
    tmp_path: Path, undisturbed_losses: dict[int, float]
) -> None:
    """The driver's host is killed, so that another host must also become the driver."""
    with running_job(tmp_path, SHORT_LEASE, spare=SPARE) as running:
        running.launched.wait_for_step(14)
        host = running.view.driver()
        saved = saved_step(running)
        struck = running.kill_host(host)
        finish_living(running)
        incident = running.only_incident()
        assert incident.kind is IncidentKind.HOST_LOST
        assert (incident.action, incident.culprit_hosts) == ("evict", (host,))
        running.check_recovered(incident, struck)
        # Its writer has survived: no sealed snapshot is lost, and a snapshot in progress may be completed.
        assert incident.resumed_step is not None
        assert incident.resumed_step >= saved >= 10
        assert SPARE in [part.host for part in running.view.rounds()[-1].hosts]
        check_all(running, undisturbed_losses)


@pytest.mark.slow
def test_training_resumes_without_snapshots_of_a_lost_machine(
    tmp_path: Path, undisturbed_losses: dict[int, float]
) -> None:
    """Its writer is lost too, in the middle of a checkpoint of which the other hosts have written their parts."""
    with running_job(tmp_path, spare=SPARE) as running:
        running.launched.wait_for_step(2 * INTERVAL)
        host = running.other_than_driver()
        arena = next(running.job.root.glob(f"megatrain-arena*.{host}"))
        for pid in writers_of(running, arena):
            os.kill(pid, signal.SIGKILL)
        struck = running.kill_host(host)
        finish_living(running)
        incident = running.only_incident()
        assert (incident.kind, incident.culprit_hosts) == (IncidentKind.HOST_LOST, (host,))
        running.check_recovered(incident, struck)
        assert running.launched.losses() == undisturbed_losses


def writers_of(running: RunningJob, arena: Path) -> list[int]:
    found = []
    for pid in running.launched.processes():
        with suppress(OSError):
            if str(arena).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


@pytest.mark.slow
def test_without_a_spare_the_job_shrinks_and_grows_again(tmp_path: Path, undisturbed_losses: dict[int, float]) -> None:
    with running_job(tmp_path, {"recovery": {"join_timeout_s": 1.0}}, nnodes="1:2") as running:
        running.launched.wait_for_step(14)
        host = running.other_than_driver()
        running.kill_host(host)
        (other,) = set(HOSTS) - {host}
        running.finish([other])
        incident = running.only_incident()
        assert (incident.kind, incident.culprit_hosts) == (IncidentKind.HOST_LOST, (host,))
        assert incident.state is IncidentState.RECOVERED
        last = running.view.rounds()[-1]
        assert ([part.host for part in last.hosts], last.world_size) == ([other], 1)
        # The layout differs; the numbers are the same except for rounding.
        assert running.launched.losses() == pytest.approx(undisturbed_losses, rel=1e-9)
        running.check_nothing_left()


@pytest.mark.slow
def test_a_killed_standby_server_is_started_again(tmp_path: Path, undisturbed_losses: dict[int, float]) -> None:
    """First that of a spare, which has no workers, then that of a host whose workers die with it."""
    with running_job(tmp_path, spare=SPARE, pace_s=0.2) as running:
        running.launched.wait_for_step(8)
        for host in (SPARE, HOSTS[1]):
            (server,) = running.pids("mt-standby", host)
            struck = time.time()
            os.kill(server, signal.SIGKILL)
            wait_until(
                lambda host=host, server=server: running.pids("mt-standby", host) not in ([], [server]),
                "another standby server",
            )
        wait_for_incident(running, lambda one: one.state is not IncidentState.OPEN)
        finish_living(running)
        incident = running.only_incident()
        assert set(incident.culprit_ranks) <= {1}
        assert incident.culprit_hosts == (HOSTS[1],)
        assert struck <= incident.moments.detected
        check_all(running, undisturbed_losses)


@pytest.mark.slow
def test_stopped_executor_is_evicted_when_steps_end(tmp_path: Path, undisturbed_losses: dict[int, float]) -> None:
    changes = {"recovery": {"stop_timeout_s": 2.0}, "train": {"steps": ENDLESS}}
    with running_job(tmp_path, SHORT_LEASE, changes, spare=SPARE, pace_s=0.5) as running:
        running.launched.wait_for_step(4)
        host = running.other_than_driver()
        before = running.view.hosts()[host].session
        executor = running.launched.executors[host]
        executor.send_signal(signal.SIGSTOP)
        try:
            held = wait_for_incident(running, lambda one: one.state is IncidentState.HELD)
            assert (held.kind, held.culprit_hosts) == (IncidentKind.CONTROL_PLANE, (host,))
            step = max(running.launched.losses())
            running.launched.wait_for_step(step + 8)
            assert len(running.view.rounds()) == 1
            # Its workers stop too, and no process remains to report it.
            for pid in [pid for rank in range(2) for pid in running.pids(f"mt-rank-{rank}", host)]:
                os.kill(pid, signal.SIGKILL)
            lost = wait_for_incident(running, lambda one: one.kind is IncidentKind.HOST_LOST)
            assert host in lost.culprit_hosts
            wait_until(lambda: len(running.view.rounds()) == 2, "the next round")
            assert host not in [part.host for part in running.view.rounds()[-1].hosts]
        finally:
            executor.send_signal(signal.SIGCONT)
        # The stale host returns as a spare, with another session.
        wait_until(
            lambda: host in running.view.hosts() and running.view.hosts()[host].session != before,
            "the stale host's new session",
        )  # fmt: skip
        wait_until(lambda: running.view.statuses()[host].phase is HostPhase.PARKED, "it to be a spare")
        wait_for_incident(running, lambda one: (one.kind, one.state) == (lost.kind, IncidentState.RECOVERED))
        running.save_and_stop()
        assert len(running.view.rounds()) == 2
        running.check_first_losses(undisturbed_losses)
        running.check_history()
        running.check_nothing_left()


def wait_for_incident(running: RunningJob, is_wanted: Callable[[Incident], bool]) -> Incident:
    wait_until(lambda: any(map(is_wanted, running.view.incidents())), "the incident")
    return next(filter(is_wanted, running.view.incidents()))
