"""Outages of networks and of etcd: who is cut off is replaced and fenced, and without etcd training goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState
from megatrain.contracts.records.job_requests import Answer, JobRequest, RequestKind
from megatrain.contracts.records.problem_reports import DriverReport
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import HostCommand
from tests.helpers.etcd_server import post
from tests.helpers.outage_job import HOSTS, MANAGEMENT, SPARE, TRAIN, OutageJob, outage_job
from tests.helpers.waiting import wait_until

TTL_S = 4
FLOOR_S = 2.0
"""Of the learned timeout; ten times the median step is less."""
QUICK = {
    "recovery": {"lease_ttl_s": TTL_S, "lease_renew_s": 1.0, "hang_floor_s": FLOOR_S, "status_interval_s": 1.0}
}  # fmt: skip
LONG_S = 2.0 * TTL_S
LOADED_S = 2.0
"""What a machine that others use may add to a step."""
RANK = 3


@pytest.mark.slow
def test_partitioned_host_is_replaced_and_comes_back_as_a_spare(tmp_path: Path) -> None:
    with outage_job(tmp_path, QUICK, has_network=True) as job:
        victim = next(host for host in HOSTS[:2] if host != job.view.driver())
        check_partition(job, victim)
        job.end()


@pytest.mark.slow
def test_partitioned_driver_is_replaced_too(tmp_path: Path) -> None:
    with outage_job(tmp_path, QUICK, has_network=True) as job:
        victim = job.view.driver()
        if victim == SPARE:
            pytest.skip("the spare drives: it came first")
        check_partition(job, victim)
        job.end()


def check_partition(job: OutageJob, victim: str) -> None:
    """Check that a host is replaced. How soon it is, benchmarks/recovery_network.py measures."""
    stale = job.sessions()[victim]
    cut_at = job.cut([victim], TRAIN, MANAGEMENT)
    assert job.workers_of(victim)
    job.wait_until_stopped(victim)
    survivors = {*HOSTS[:2], SPARE} - {victim}
    after = job.wait_for_round(2)
    assert {part.host for part in after.hosts} == survivors
    before = job.view.rounds()[0]
    assert [part.host for part in before.hosts].index(victim) == [part.host for part in after.hosts].index(SPARE)
    assert stale in after.fenced
    incident = job.view.wait_recovered(0)
    assert (incident.kind, incident.culprit_hosts, incident.culprit_ranks) == (IncidentKind.HOST_LOST, (victim,), ())
    assert (incident.action, incident.state) == ("evict", IncidentState.RECOVERED)
    moments = incident.moments
    assert abs(moments.began - cut_at) < moments.detected - moments.began, "it began with the cut, not when it was seen"
    # mended: nothing of the stale host trains, and its new life is a spare
    job.mend([victim], TRAIN, MANAGEMENT)
    wait_until(lambda: job.phase_of(victim) is HostPhase.PARKED and victim in job.sessions(), "the host")
    assert job.sessions()[victim] != stale
    assert job.workers_of(victim) == []
    assert len(job.view.rounds()) == 2
    job.launched.executors[SPARE].kill()
    again = job.wait_for_round(3)
    assert {part.host for part in again.hosts} == set(HOSTS[:2])
    assert job.view.wait_recovered(1).culprit_hosts == (SPARE,)
    assert job.holds() == []


@pytest.mark.slow
def test_restarted_etcd_goes_unnoticed(tmp_path: Path) -> None:
    with outage_job(tmp_path, QUICK) as job:
        sessions = job.sessions()
        (member,) = job.etcd.members
        killed_at = time.time()
        member.kill()
        job.wait_seconds(killed_at, LONG_S)
        member.start()
        job.etcd.wait_ready()
        check_no_host_was_evicted(job, sessions, killed_at)
        check_next_fault_is_answered(job)
        job.end()


@pytest.mark.slow
def test_leader_of_three_is_frozen_for_a_while(tmp_path: Path) -> None:
    with outage_job(tmp_path, QUICK, num_members=3) as job:
        sessions = job.sessions()
        leader = job.etcd.leader()
        lost_at = time.time()
        leader.freeze()
        # the other two go on: a fault meanwhile is answered as ever
        check_next_fault_is_answered(job)
        back_to_work = time.time()
        job.wait_seconds(lost_at, 15.0)
        leader.thaw()
        job.etcd.wait_ready()
        check_no_host_was_evicted(job, sessions, back_to_work, num_recoveries=1)
        job.end()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["the driver", "all hosts"])
def test_management_network_is_down_while_training_goes_on(tmp_path: Path, who: str) -> None:
    with outage_job(tmp_path, QUICK, has_network=True) as job:
        sessions, driver = job.sessions(), job.view.driver()
        cut_off = [driver] if who == "the driver" else list(HOSTS)
        cut_at = job.cut(cut_off, MANAGEMENT)
        wait_until(lambda: not set(cut_off) & set(job.sessions()), "the leases to run out")
        request = JobRequest("r1", RequestKind.CHECKPOINT, "a test", time.time())
        job.view.client.put(job.view.keys.request(request.request_id), encode(request))
        job.wait_seconds(cut_at, LONG_S)
        if who != "all hosts" and cut_off != [SPARE]:
            (hold,) = job.holds()
            assert hold.culprit_hosts == tuple(cut_off)
            assert any("held" in text for text in alarms(job))
        job.mend(cut_off, MANAGEMENT)
        check_no_host_was_evicted(job, sessions, cut_at)
        wait_until(lambda: answer_to(job, request) is not None, "the answer")
        number = max(command.number for command in job.view.all("commands", HostCommand))
        wait_until(lambda: obeyed_by_trainers(job) >= number, "all hosts to have obeyed")
        if cut_off != [SPARE]:
            check_one_hold_that_is_over(job)
        check_next_fault_is_answered(job)
        job.end()


@pytest.mark.slow
def test_all_leases_revoked_by_hand(tmp_path: Path) -> None:
    with outage_job(tmp_path, QUICK) as job:
        sessions = job.sessions()
        revoked_at = time.time()
        url = job.etcd.urls[0]
        for lease in post(url, "/v3/lease/leases", {})["leases"]:
            post(url, "/v3/lease/revoke", {"ID": lease["ID"]})
        check_no_host_was_evicted(job, sessions, revoked_at)
        check_one_hold_that_is_over(job)
        check_next_fault_is_answered(job)
        job.end()


def test_rank_failure_during_an_etcd_outage_is_handled_after_it(tmp_path: Path) -> None:
    with outage_job(tmp_path, QUICK) as job:
        sessions = job.sessions()
        (member,) = job.etcd.members
        member.kill()
        struck = job.kill_a_rank(RANK)
        job.wait_seconds(struck, LONG_S)
        member.start()
        job.etcd.wait_ready()
        back_at = time.time()
        job.wait_for_round(2)
        incident = job.view.wait_recovered(0)
        check_rank_was_named(job, incident)
        # its time is that of the failure, not of the report
        assert incident.moments.began < back_at
        wait_until(job.is_registered_as(sessions), "all sessions of before")
        assert len(job.view.rounds()) == 2
        assert job.holds() == []
        job.end()


def check_no_host_was_evicted(
    job: OutageJob, sessions: dict[str, str], since: float, *, num_recoveries: int = 0
) -> None:
    """Check that all hosts come back as who they were, and that no step waited for anything since then."""
    wait_until(job.is_registered_as(sessions), "all sessions of before")
    wait_until(lambda: job.view.driver() in sessions, "a driver")
    job.wait_for_more_steps(20)
    median_s, longest_s = job.step_times(since)
    assert longest_s <= 3.0 * median_s + 1.0 + LOADED_S
    assert len(job.view.rounds()) == 1 + num_recoveries
    assert len(job.recoveries()) == num_recoveries


def check_next_fault_is_answered(job: OutageJob) -> None:
    """Check that the job still heals: nothing of the outage is left."""
    number, num_before = len(job.view.rounds()), len(job.recoveries())
    job.kill_a_rank(RANK)
    job.wait_for_round(number + 1)
    wait_until(
        lambda: len(job.recoveries()) > num_before and job.recoveries()[-1].state is IncidentState.RECOVERED,
        "the recovery",
    )
    assert len(job.recoveries()) == num_before + 1
    check_rank_was_named(job, job.recoveries()[-1])


def check_rank_was_named(job: OutageJob, incident: Incident) -> None:
    host = job.view.rounds()[incident.round - 1].host_of(RANK).host
    assert (incident.kind, incident.action) == (IncidentKind.FAILURE, "restart")
    assert (incident.culprit_ranks, incident.culprit_hosts) == ((RANK,), (host,))


def check_one_hold_that_is_over(job: OutageJob) -> None:
    """Check that the outage is on record, once, as one that asked for nothing."""
    wait_until(lambda: any("over_unix_s" in one.notes for one in job.holds()), "the end of the hold")
    (hold,) = job.holds()
    assert set(hold.culprit_hosts) <= {part.host for part in job.view.rounds()[0].hosts}
    assert hold.culprit_hosts


def alarms(job: OutageJob) -> tuple[str, ...]:
    item = job.view.client.get(job.view.keys.report)
    return () if item is None else decode(DriverReport, item.value, job.view.keys.report).alarms


def answer_to(job: OutageJob, request: JobRequest) -> Answer | None:
    found = [one for one in job.view.all("answers", Answer) if one.request_id == request.request_id]
    return found[0] if found and found[0].is_accepted else None


def obeyed_by_trainers(job: OutageJob) -> int:
    """Return the command up to which every host that trains has obeyed."""
    statuses = job.view.statuses()
    names = [part.host for part in job.view.rounds()[0].hosts]
    return min(statuses[name].obeyed_command if name in statuses else -1 for name in names)
