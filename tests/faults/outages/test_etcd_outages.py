"""Outages of etcd: training continues without it, and all hosts return with their sessions."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tests.helpers.etcd_server import post
from tests.helpers.outage_checks import (
    LONG_S,
    RANK,
    Before,
    check_next_fault_is_answered,
    check_no_host_was_evicted,
    check_one_hold_that_is_over,
    check_rank_was_named,
    lasting_job,
)
from tests.helpers.outage_job import HOSTS
from tests.helpers.shared_jobs import SharedJobs
from tests.helpers.waiting import wait_until

FROZEN_S = 15.0

launch = partial(lasting_job, hosts=HOSTS[:2])


def test_rank_failure_during_an_etcd_outage_is_handled_after_it(shared_jobs: SharedJobs) -> None:
    with shared_jobs.borrowed("one member", launch) as job:
        before = Before.of(job)
        (member,) = job.etcd.members
        member.kill()
        struck = job.kill_a_rank(RANK)
        job.wait_seconds(struck, LONG_S)
        member.start()
        job.etcd.wait_ready()
        back_at = time.time()
        job.wait_for_round(before.round.number + 1)
        incident = job.view.wait_recovered(before.num_recoveries + before.num_holds)
        check_rank_was_named(job, incident)
        # Its time is that of the failure, not of the report.
        assert incident.moments.began < back_at
        wait_until(job.is_registered_as(before.sessions), "all earlier sessions")
        assert len(job.view.rounds()) == before.round.number + 1
        assert before.new_holds(job) == []


@pytest.mark.slow
def test_restarted_etcd_evicts_no_host(shared_jobs: SharedJobs) -> None:
    with shared_jobs.borrowed("one member", launch) as job:
        before = Before.of(job)
        (member,) = job.etcd.members
        killed_at = time.time()
        member.kill()
        job.wait_seconds(killed_at, LONG_S)
        member.start()
        job.etcd.wait_ready()
        check_no_host_was_evicted(job, before, killed_at)
        check_next_fault_is_answered(job)


@pytest.mark.slow
def test_all_leases_revoked_by_hand(shared_jobs: SharedJobs) -> None:
    with shared_jobs.borrowed("one member", launch) as job:
        before = Before.of(job)
        revoked_at = time.time()
        url = job.etcd.urls[0]
        for lease in post(url, "/v3/lease/leases", {})["leases"]:
            post(url, "/v3/lease/revoke", {"ID": lease["ID"]})
        check_no_host_was_evicted(job, before, revoked_at)
        check_one_hold_that_is_over(job, before)
        check_next_fault_is_answered(job)


@pytest.mark.slow
def test_leader_of_three_is_frozen_for_a_while(shared_jobs: SharedJobs) -> None:
    with shared_jobs.borrowed("three members", partial(launch, num_members=3)) as job:
        before = Before.of(job)
        leader = job.etcd.leader()
        lost_at = time.time()
        leader.freeze()
        # The other two continue: a fault meanwhile is handled as usual.
        check_next_fault_is_answered(job)
        back_to_work = time.time()
        job.wait_seconds(lost_at, FROZEN_S)
        leader.thaw()
        job.etcd.wait_ready()
        check_no_host_was_evicted(job, before, back_to_work, num_recoveries=1)
