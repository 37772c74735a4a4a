"""The number of training hosts: a step takes as long as its slots; no round waits or ends for hosts that save none."""

from __future__ import annotations

import math

import pytest

from megatrain_launcher.driver.policy import GROW_AFTER_S, Policy
from tests.helpers.driver_story import begin, drive, go_on, go_on_until, goes_on, members
from tests.helpers.written_verdicts import outcome_of, write_verdict

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
    go_on_until(job, goes_on(job, 1), 5.0)
    for number in range(num_running, num_hosts):
        job.hosts[f"host-{number}"].start(job.now)
    go_on(job, GROW_AFTER_S + 5.0, step_s=0.5)
    assert len(members(job, 1)) == num_running
    found = {number: len(round_.hosts) for number, round_ in job.rounds().items()}
    assert found == ({1: num_running} if then is None else {1: num_running, 2: then})
    if then is None:
        decided = job.driver.decide(job.now)
        assert decided is not None
        assert decided.reason.endswith(f"with {num_hosts} hosts a step would take the same time")


@pytest.mark.parametrize(
    ("num_microbatches", "num_hosts", "is_waiting"),
    [(8, 8, True), (8, 7, False), (8, 4, True), (64, 8, True), (12, 8, False)],
)
def test_a_lost_host_is_awaited_only_if_steps_need_it(
    num_microbatches: int, num_hosts: int, *, is_waiting: bool
) -> None:
    job = begin(policy_of(num_microbatches, 3, num_hosts), num_hosts)
    job.hosts["host-0"].kill()
    job.hosts["host-0"].lose_lease()
    took_s = go_on_until(job, goes_on(job, 2), 2 * SHRINK_AFTER_S, step_s=0.5)
    assert len(members(job, 2)) == num_hosts - 1
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
    verdict_id = write_verdict(job, hosts=("host-2",), step_s=1.5, gain_s_per_step=0.5)
    drive(job)
    outcome = outcome_of(job, verdict_id)
    assert outcome is not None
    assert text in outcome.reason
    if gain_s is None:
        assert "the gain is less than the cost" in outcome.reason
        return
    assert outcome.gain_s == pytest.approx(gain_s * 999_970, rel=1e-3)
    assert outcome.cost_s == 30.0 + (SHRINK_AFTER_S if gain_s < 0.5 else 0.0), (
        "with slower steps the job first waits for a host"
    )
