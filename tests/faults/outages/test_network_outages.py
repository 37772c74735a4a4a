"""Outages of networks: a host that is cut off is replaced and fenced, and training continues without a path to etcd.

All tests use one job of two hosts and a spare. benchmarks/recovery_network.py measures how soon a host is replaced.
"""

from __future__ import annotations

from functools import partial

import pytest

from megatrain.contracts.records.incident import IncidentKind, IncidentState
from megatrain.contracts.records.job_requests import Answer, JobRequest, RequestKind
from megatrain.contracts.records.problem_reports import DriverReport
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import HostCommand
from tests.helpers.outage_checks import (
    LONG_S,
    Before,
    check_next_fault_is_answered,
    check_no_host_was_evicted,
    check_one_hold_that_is_over,
    lasting_job,
    wait_until_parked,
)
from tests.helpers.outage_job import MANAGEMENT, TRAIN, OutageJob
from tests.helpers.shared_jobs import SharedJobs
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.slow

launch = partial(lasting_job, has_network=True)


@pytest.mark.parametrize("who", ["another host", "the driver"])
def test_partitioned_host_is_replaced_and_comes_back_as_a_spare(shared_jobs: SharedJobs, who: str) -> None:
    """The spare that replaces the second host is the first host, if the tests share their job."""
    with shared_jobs.borrowed("network", launch) as job:
        before = Before.of(job)
        if who == "the driver" and before.driver in before.spares:
            pytest.skip("the spare drives")
        others = before.trainers - {before.driver}
        check_partition(job, before, before.driver if who == "the driver" else min(others))


def check_partition(job: OutageJob, before: Before, victim: str) -> None:
    (spare,) = before.spares
    number = before.round.number
    cut_at = job.cut([victim], TRAIN, MANAGEMENT)
    assert job.workers_of(victim)
    job.wait_until_stopped(victim)
    after = job.wait_for_round(number + 1)
    assert {part.host for part in after.hosts} == before.trainers - {victim} | {spare}
    # The spare has taken the victim's place.
    places = [[part.host for part in round_.hosts] for round_ in (before.round, after)]
    assert places[0].index(victim) == places[1].index(spare)
    assert before.sessions[victim] in after.fenced
    incident = job.view.wait_recovered(before.num_recoveries + before.num_holds)
    assert (incident.kind, incident.culprit_hosts, incident.culprit_ranks) == (IncidentKind.HOST_LOST, (victim,), ())
    assert (incident.action, incident.state) == ("evict", IncidentState.RECOVERED)
    moments = incident.moments
    assert abs(moments.began - cut_at) < moments.detected - moments.began, "it began with the cut, not when it was seen"
    # The network is repaired: no process of the stale host trains, and its new session is a spare.
    job.reconnect([victim], TRAIN, MANAGEMENT)
    wait_until_parked(job, victim, before.sessions[victim])
    assert len(job.view.rounds()) == number + 1
    assert before.new_holds(job) == []


@pytest.mark.parametrize("who", ["the driver", "all hosts"])
def test_management_network_is_down_while_training_goes_on(shared_jobs: SharedJobs, who: str) -> None:
    with shared_jobs.borrowed("network", launch) as job:
        before = Before.of(job)
        cut_off = [before.driver] if who == "the driver" else sorted(before.sessions)
        is_training_cut_off = bool(before.trainers & set(cut_off))
        cut_at = job.cut(cut_off, MANAGEMENT)
        wait_until(lambda: not set(cut_off) & set(job.sessions()), "the leases to run out")
        request = JobRequest(f"request of {who}", RequestKind.CHECKPOINT, "a test")
        job.view.client.put(job.view.keys.request(request.request_id), encode(request))
        job.wait_seconds(cut_at, LONG_S)
        if who == "the driver" and is_training_cut_off:
            (hold,) = before.new_holds(job)
            assert hold.culprit_hosts == tuple(cut_off)
            assert any("held" in text for text in alarms(job))
        job.reconnect(cut_off, MANAGEMENT)
        check_no_host_was_evicted(job, before, cut_at)
        wait_until(lambda: answer_to(job, request) is not None, "the answer")
        number = max(command.number for command in job.view.all("commands", HostCommand))
        wait_until(lambda: completed_by_trainers(job, before) >= number, "all hosts to have completed the command")
        if is_training_cut_off:
            check_one_hold_that_is_over(job, before)
        check_next_fault_is_answered(job)


def alarms(job: OutageJob) -> tuple[str, ...]:
    item = job.view.client.get(job.view.keys.report)
    return () if item is None else decode(DriverReport, item.value, job.view.keys.report).alarms


def answer_to(job: OutageJob, request: JobRequest) -> Answer | None:
    found = [one for one in job.view.all("answers", Answer) if one.request_id == request.request_id]
    return found[0] if found and found[0].is_accepted else None


def completed_by_trainers(job: OutageJob, before: Before) -> int:
    """Return the number of the last command that every training host has completed, along with all before it."""
    statuses = job.view.statuses()
    return min(statuses[name].completed_command if name in statuses else -1 for name in before.trainers)
