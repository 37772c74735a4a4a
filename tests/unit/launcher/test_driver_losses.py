"""Hosts whose leases are gone: which losses end a hold, which are held, and how often that is reported."""

from __future__ import annotations

from dataclasses import replace

from megatrain.contracts.records.incident import IncidentKind
from tests.helpers.driver_story import POLICY, begin, drive, go_on, incidents, members, say_done
from tests.helpers.simulated_etcd import KEYS
from tests.helpers.simulated_job import SimulatedJob

THREE = replace(POLICY, min_hosts=3, max_hosts=3, feasible_counts={3: 1})
FOUR = replace(POLICY, min_hosts=4, max_hosts=4, feasible_counts={4: 1})


def cut_off(job: SimulatedJob, *names: str) -> None:
    for name in names:
        job.hosts[name].is_connected = False
        job.hosts[name].lose_lease()


def wait(job: SimulatedJob, seconds: float) -> None:
    """Let time pass without reports of hosts."""
    end = job.now + seconds
    while job.now < end:
        job.now += 0.5
        drive(job)


def test_loss_of_one_of_three_hosts_is_not_many() -> None:
    job = begin(THREE, 4)
    lost = members(job, 1)[1]
    stepped_at = job.now
    wait(job, 3.0)
    cut_off(job, lost)
    wait(job, 5.0)
    assert KEYS.halt(1) not in job.etcd.items
    wait(job, 4.0)  # no step for 10 s
    assert KEYS.halt(1) in job.etcd.items
    (incident,) = incidents(job)
    assert (incident.kind, incident.culprit_hosts) == (IncidentKind.HOST_LOST, (lost,))
    assert incident.moments.began <= stepped_at, "it began with the last step, not with the end of the lease"


def test_many_lost_leases_are_held_while_others_train() -> None:
    job = begin(FOUR, 4)
    cut_off(job, *members(job, 1)[2:])
    wait(job, 100.0)
    assert KEYS.halt(1) not in job.etcd.items
    assert [incident.kind for incident in incidents(job)] == [IncidentKind.CONTROL_PLANE]


def test_many_lost_leases_end_the_round_when_others_are_done() -> None:
    job = begin(FOUR, 4)
    hosts = members(job, 1)
    cut_off(job, *hosts[2:])
    say_done(job, *hosts[:2])
    # Until then the others may still save.
    wait(job, POLICY.fence_rule.deadlines(0.0).end_s)
    assert KEYS.halt(1) not in job.etcd.items
    wait(job, 5.0)
    assert KEYS.halt(1) in job.etcd.items
    (lost,) = [incident for incident in incidents(job) if incident.kind is IncidentKind.HOST_LOST]
    assert lost.culprit_hosts == tuple(hosts[2:])


def test_flapping_lease_leaves_a_bounded_history() -> None:
    job = begin()
    host = job.hosts[members(job, 1)[0]]
    for _ in range(40):
        host.lose_lease()
        host.register(job.now)
        go_on(job, 0.2)
    assert list(job.rounds()) == [1]
    assert len(incidents(job)) == 20
    assert "20 hosts" not in incidents(job)[0].reason
    assert incidents(job)[0].reason.startswith("held: 1 of 2 hosts lost its lease (")
