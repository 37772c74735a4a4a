"""Which hosts take part in a round, in which order of ranks, and what the loss of hosts ends."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatrain.contracts.records.host_records import HostRecord
from megatrain.contracts.records.incident import IncidentKind
from megatrain.contracts.records.rounds import Round
from megatrain_launcher.driver.policy import GROW_AFTER_S, Policy
from megatrain_launcher.driver.ranks import choose, parts_of
from tests.helpers.driver_story import POLICY, DriverStory, begin
from tests.helpers.simulated_etcd import KEYS


def record(name: str, switch: str = "") -> HostRecord:
    labels = {"switch": switch} if switch else {}
    return HostRecord(name, f"{name}-1", 1, name, 1, 2, 2, "", "", "", 0.0, is_fit=True, labels=labels)


def records(*texts: str) -> dict[str, HostRecord]:
    """Return the records of hosts by name, from texts "name" or "name@switch"."""
    return {one.host: one for one in (record(*text.split("@")) for text in texts)}


def round_of(*hosts: HostRecord) -> Round:
    return Round(1, 2 * len(hosts), parts_of(hosts, 2), "", 1, "", "", 0.0)


def names(chosen: tuple[HostRecord, ...]) -> list[str]:
    return [one.host for one in chosen]


def test_first_placement_follows_switches_then_names() -> None:
    found = choose(records("h10@s1", "h2@s2", "h3@s1", "h1@s10"), None, 4)
    assert names(found) == ["h3", "h10", "h2", "h1"]
    assert [part.first_rank for part in parts_of(found, 2)] == [0, 2, 4, 6]


def test_members_keep_their_ranks_and_the_nearest_spare_joins() -> None:
    for available, previous, count, chosen in [
        ("spare c a", "a b c", 3, "a spare c"),
        ("x@s2 y@s1 a@s1 b@s1", "a@s1 b@s1 c@s1", 3, "a b y"),
        ("x@s2 y@s1 a@s1 b@s1 c@s1", "a@s1 b@s1 c@s1", 3, "a b c"),
        ("a c d", "a b c d", 3, "a d c"),
        ("a b c d e", "b a", 4, "b a c d"),
    ]:
        before = round_of(*records(*previous.split()).values())
        assert names(choose(records(*available.split()), before, count)) == chosen.split(), (available, previous)


@settings(max_examples=60, derandomize=True)
@given(st.sets(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9), unique=True), st.data())
def test_every_rank_once_and_members_keep_their_place(
    present: set[int], before: list[int], data: st.DataObject
) -> None:
    available = {f"h{number}": record(f"h{number}", f"s{number % 3}") for number in present}
    previous = round_of(*(record(f"h{number}") for number in before)) if before else None
    count = data.draw(st.integers(1, len(present)))
    chosen = choose(available, previous, count)
    assert len(set(names(chosen))) == count
    if previous is not None:
        members = [host.host for host in previous.hosts if host.host in available][:count]
        kept = [
            host for host in members if (slot := [p.host for p in previous.hosts].index(host)) < count and slot >= 0
        ]
        assert all(names(chosen)[[p.host for p in previous.hosts].index(host)] == host for host in kept)


SHRINK_AFTER_S = 60.0


def policy_of(num_microbatches: int, least: int, most: int) -> Policy:
    """Return the limits of a job with one replica on each host."""
    slots = {count: math.ceil(num_microbatches / count) for count in range(least, most + 1)}
    return Policy(
        min_hosts=least, max_hosts=most, num_workers=1, feasible_counts=slots, shrink_after_s=SHRINK_AFTER_S,
        join_timeout_s=10 * SHRINK_AFTER_S, restart_cost_s=30.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_microbatches", "num_hosts", "best", "slots", "fewest"),
    [
        (8, 3, 0, math.inf, 4),
        (8, 4, 4, 2, 4),
        (8, 7, 7, 2, 4),
        (8, 8, 8, 1, 8),
        (8, 9, 8, 1, 8),
        (64, 7, 7, 10, 7),
        (12, 8, 8, 2, 6),
        (1, 8, 8, 1, 4),
    ],
)
def test_count_has_slots_and_the_fewest_equally_fast_hosts(
    num_microbatches: int, num_hosts: int, best: int, slots: float, fewest: int
) -> None:
    policy = policy_of(num_microbatches, 4, 8)
    found = policy.best_count(num_hosts), policy.slots(num_hosts), policy.fewest_as_fast(num_hosts)
    assert found == (best, slots, fewest)


@pytest.mark.parametrize(
    ("num_microbatches", "num_running", "num_hosts", "then"),
    [
        (8, 4, 7, None),  # two slots with 4, 5, 6 and 7 hosts
        (8, 4, 8, 8),
        (16, 4, 7, 7),
        (16, 6, 7, None),
    ],
)
def test_a_job_grows_only_when_a_step_becomes_faster(
    num_microbatches: int, num_running: int, num_hosts: int, then: int | None
) -> None:
    job = begin(policy_of(num_microbatches, 4, 8), num_hosts, up=num_running)
    job.go_on_until(job.goes_on(1), 5.0)
    for number in range(num_running, num_hosts):
        job.hosts[f"host-{number}"].start(job.now)
    job.go_on(GROW_AFTER_S + 5.0, step_s=0.5)
    assert len(job.members(1)) == num_running
    found = {number: len(round_.hosts) for number, round_ in job.rounds().items()}
    assert found == ({1: num_running} if then is None else {1: num_running, 2: then})
    if then is None:
        assert job.reason().endswith(f"with {num_hosts} hosts a step would take the same time")


@pytest.mark.parametrize(
    ("num_microbatches", "num_hosts", "is_waiting"),
    [(8, 8, True), (8, 7, False), (8, 4, True), (64, 8, True), (12, 8, False)],
)
def test_a_lost_host_is_awaited_only_if_steps_need_it(
    num_microbatches: int, num_hosts: int, *, is_waiting: bool
) -> None:
    job = begin(policy_of(num_microbatches, 3, num_hosts), num_hosts)
    job.lose("host-0")
    took_s = job.go_on_until(job.goes_on(2), 2 * SHRINK_AFTER_S, step_s=0.5)
    assert len(job.members(2)) == num_hosts - 1
    assert (took_s >= SHRINK_AFTER_S) == is_waiting


@pytest.mark.parametrize(
    ("num_microbatches", "num_hosts", "num_spares", "gain_s", "text"),
    [
        # a host that takes 1.5 s of a step of 1 s
        (8, 8, 0, None, "on 7 of 8 hosts, 2 slots a step after 1 (0 spares can take part): 0 s a step"),
        (8, 8, 1, 0.5, "0.5 s a step"),
        (64, 8, 0, 1.5 - 1.0 * 10 / 8, "on 7 of 8 hosts, 10 slots a step after 8 (0 spares can take part): 0.25 s"),
        (8, 7, 0, 0.5, "on 6 of 7 hosts, 2 slots a step after 2 (0 spares can take part): 0.5 s a step"),
    ],
)
def test_an_eviction_counts_the_slots_of_the_hosts_that_remain(
    num_microbatches: int, num_hosts: int, num_spares: int, gain_s: float | None, text: str
) -> None:
    job = begin(policy_of(num_microbatches, 1, num_hosts), num_hosts + num_spares)
    verdict_id = job.write_verdict(hosts=("host-2",), step_s=1.5, gain_s_per_step=0.5)
    job.drive()
    outcome = job.outcome(verdict_id)
    assert text in outcome.reason
    if gain_s is None:
        assert "the gain is less than the cost" in outcome.reason
        return
    assert outcome.gain_s == pytest.approx(gain_s * 999_970, rel=1e-3)
    assert outcome.cost_s == 30.0 + (SHRINK_AFTER_S if gain_s < 0.5 else 0.0), (
        "with slower steps the job first waits for a host"
    )


THREE = replace(POLICY, min_hosts=3, max_hosts=3, feasible_counts={3: 1})
FOUR = replace(POLICY, min_hosts=4, max_hosts=4, feasible_counts={4: 1})


def wait(job: DriverStory, seconds: float) -> None:
    """Let time pass without reports of hosts."""
    end = job.now + seconds
    while job.now < end:
        job.now += 0.5
        job.drive()


def test_loss_of_one_of_three_hosts_is_not_many() -> None:
    job = begin(THREE, 4)
    lost = job.members(1)[1]
    stepped_at = job.now
    wait(job, 3.0)
    job.cut_off(lost)
    wait(job, 5.0)
    assert KEYS.halt(1) not in job.etcd.items
    wait(job, 4.0)  # no step for 10 s
    assert KEYS.halt(1) in job.etcd.items
    (incident,) = job.incidents()
    assert (incident.kind, incident.culprit_hosts) == (IncidentKind.HOST_LOST, (lost,))
    assert incident.moments.began <= stepped_at, "it began with the last step, not with the end of the lease"


def test_many_lost_leases_are_held_while_others_train() -> None:
    job = begin(FOUR, 4)
    job.cut_off(*job.members(1)[2:])
    wait(job, 100.0)
    assert KEYS.halt(1) not in job.etcd.items
    assert [incident.kind for incident in job.incidents()] == [IncidentKind.CONTROL_PLANE]


def test_many_lost_leases_end_the_round_when_others_are_done() -> None:
    job = begin(FOUR, 4)
    hosts = job.members(1)
    job.cut_off(*hosts[2:])
    job.say_done(*hosts[:2])
    # Until then the others may still save.
    wait(job, POLICY.fence_rule.deadlines(0.0).end_s)
    assert KEYS.halt(1) not in job.etcd.items
    wait(job, 5.0)
    assert KEYS.halt(1) in job.etcd.items
    (lost,) = [incident for incident in job.incidents() if incident.kind is IncidentKind.HOST_LOST]
    assert lost.culprit_hosts == tuple(hosts[2:])


def test_flapping_lease_leaves_a_bounded_history() -> None:
    job = begin()
    host = job.hosts[job.members(1)[0]]
    for _ in range(40):
        host.lose_lease()
        host.register(job.now)
        job.go_on(0.2)
    assert list(job.rounds()) == [1]
    assert len(job.incidents()) == 20
    assert "20 hosts" not in job.incidents()[0].reason
    assert job.incidents()[0].reason.startswith("held: 1 of 2 hosts lost its lease (")
