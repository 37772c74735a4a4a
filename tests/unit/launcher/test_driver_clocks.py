"""Clocks of hosts or drivers that are wrong by minutes: time limits still apply, and records stay in order."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from megatrain.contracts.records.host_records import HostStatus, Milestones, RankFailure, Stall
from megatrain.contracts.records.incident import Incident, phase_seconds
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import JobRecord
from megatrain_launcher.driver.breaking import most_informative, stall_began
from megatrain_launcher.driver.incidents import history_of
from tests.helpers.driver_story import ELASTIC, POLICY, DriverStory, begin
from tests.helpers.simulated_etcd import KEYS

ONE_RESTART = replace(POLICY, restarts_per_hour=1)


def in_order(incident: Incident) -> bool:
    """Return whether no time is before the time that it follows."""
    moments = astuple(incident.moments)
    return None not in moments and list(moments) == sorted(moments)


def recover(job: DriverStory, number: int, skew_s: float) -> None:
    """Let the job continue with hosts whose clocks are wrong, until a round trains."""
    for _ in range(30):
        job.now += 0.1
        for host in job.hosts.values():
            host.read_log(1000)
            host.act(job.now + skew_s)
        job.drive()
    assert number in job.rounds()
    assert job.is_training()


@pytest.mark.parametrize("skew_s", [-600.0, -0.05, 0.05, 600.0])
def test_moments_are_in_order_with_any_clock_of_hosts(skew_s: float) -> None:
    job = begin()
    failed_at = job.now
    job.hosts["host-0"].fail(job.now + skew_s, is_cascade=False)
    recover(job, 2, skew_s)
    (incident,) = job.incidents()
    assert in_order(incident), incident.moments
    assert failed_at - 1.0 <= incident.moments.began
    assert incident.moments.first_step <= failed_at + 3.0
    assert all(seconds >= 0 for seconds in phase_seconds(incident.moments).values())
    assert incident.effective_time_ratio is not None
    assert 0.02 < incident.effective_time_ratio < 0.1, "only repeated steps count as lost"


@pytest.mark.parametrize("jump_s", [-300.0, 300.0])
def test_moments_are_in_order_when_another_driver_goes_on(jump_s: float) -> None:
    job = begin()
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.drive()
    job.now += jump_s  # the next driver's clock
    job.change_driver()
    recover(job, 2, 0.0)
    (incident,) = job.incidents()
    assert in_order(incident), incident.moments


def test_a_recovery_that_breaks_again_is_timed_to_its_end() -> None:
    job = begin()
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.drive()
    job.obey()
    job.drive()
    job.obey()
    for name in job.members(2):  # All have joined, and none has loaded.
        key = KEYS.status(name)
        status = decode(HostStatus, job.etcd.items[key].value, key)
        job.etcd.put(key, encode(replace(status, milestones=Milestones(job.now, job.now))))
    job.drive()
    (incident,) = job.incidents()
    assert (incident.moments.joined, incident.moments.loaded) == (job.now, None)
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.now += 5.0
    recover(job, 3, 0.0)
    first, second = job.incidents()
    assert in_order(first)
    assert in_order(second)
    assert first.next_round == second.next_round == 3
    assert first.moments.joined >= second.moments.round_written


def test_restart_limit_holds_with_a_slow_clock_of_a_new_driver() -> None:
    job = begin(ONE_RESTART)
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.go_on_until(job.goes_on(2), 2.0)
    job.now -= 300.0
    job.change_driver()
    job.go_on(1.0)
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.go_on(1.0)
    assert "recovery.restarts_per_hour=1" in job.end().reason
    ids = [one.incident_id for one in history_of(job.driver.state)]
    assert len(ids) == 2
    assert ids != sorted(ids), "the ids contain the times of two clocks"


@pytest.mark.parametrize("skew_s", [-7200.0, 7200.0])
def test_restart_limit_holds_with_any_clock_of_hosts(skew_s: float) -> None:
    job = DriverStory(ONE_RESTART, 2)
    record = JobRecord("sim", "l", "", {}, 2, 2, 2, "runs/sim", "host-0", job.now + skew_s)
    job.etcd.put(KEYS.record, encode(record))
    for host in job.hosts.values():
        host.start(job.now)
    job.go_on(3.0)
    for _ in range(2):
        job.hosts["host-0"].fail(job.now - abs(skew_s), is_cascade=False)
        job.go_on(3.0)
    assert "recovery.restarts_per_hour=1" in job.end().reason


def test_check_is_timed_by_the_clock_of_the_driver() -> None:
    job = begin(num_hosts=2)
    name = job.members(1)[0]
    job.hosts[name].fail(job.now, is_cascade=False, exit_code=-11, label="segfault", action="restart_then_check")
    job.go_on(2.0)
    assert list(job.rounds()) == [1]
    job.now += 1000.0
    job.change_driver()
    job.go_on(5.0)
    assert list(job.rounds()) == [1], "the check has run for 7 s"


def test_times_of_failures_are_used_when_clocks_nearly_agree() -> None:
    job = begin()
    for skew_s, rank in ((-30.0, 0), (-600.0, 1), (600.0, 2)):
        host = job.hosts[job.members(1)[rank // 2]]
        host.failures = (*host.failures, RankFailure(rank, 1, job.now + skew_s))
        host.write_status(job.now)
    job.driver.read_log(1000, job.now)
    reported = job.driver.state.failures[1]
    assert [reported[rank].at_unix_s for rank in range(3)] == [job.now - 30.0, job.now, job.now]


def test_a_stall_began_before_its_report_by_the_drivers_clock() -> None:
    job = begin()
    name = job.members(1)[0]
    host = job.hosts[name]
    host.stall = Stall("step", 7, 5.0, 5.0, job.now - 600.0, (0,))
    host.write_status(job.now)
    job.driver.read_log(1000, job.now)
    assert stall_began(job.driver.state, name, job.now + 3.0) == pytest.approx(job.now - 5.0)
    job.stall(name)
    job.driver.read_log(1000, job.now)
    assert stall_began(job.driver.state, name, job.now + 3.0) == pytest.approx(job.now - 5.0)


def test_incident_keeps_the_most_informative_failures() -> None:
    victims = [RankFailure(rank, 69, 100.0 + rank / 1000, "network", is_cascade=True) for rank in range(9999)]
    root = RankFailure(9999, -9, 200.0)
    kept = most_informative([*victims, root])
    assert len(kept) == 32
    assert kept[-1] == root
    assert list(kept[:-1]) == victims[:31]


def test_an_elastic_job_that_shrank_is_one_recovery() -> None:
    job = begin(ELASTIC, 2)
    lost = job.members(1)[1]
    job.lose(lost)
    job.go_on_until(job.goes_on(2), 60.0)
    job.go_on(1.0)
    (incident,) = job.incidents()
    assert in_order(incident)
    assert phase_seconds(incident.moments)["rendezvous"] > ELASTIC.shrink_after_s
