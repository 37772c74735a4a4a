"""The rank or host that makes a job slow, and the cause: simulated jobs in which both are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.host_verdict import Cause, VerdictConfidence
from megatrain_diagnostics.analysis.candidates import least_score
from megatrain_diagnostics.analysis.findings import Finding, StragglerAssessment, Thresholds
from megatrain_diagnostics.analysis.live import LiveDetection
from tests.helpers.synthetic_steps import BACKWARD, FORWARD, Array, SyntheticJob
from tests.helpers.watched_job import watch_job

HIGH, LOW = VerdictConfidence.HIGH, VerdictConfidence.LOW
DP4 = Layout(dp_size=4)
CHANGE_AT = 30
WITHIN = 20
Change = Callable[[SyntheticJob], object]


def watch(
    job: SyntheticJob, num_steps: int, change: Change | None = None
) -> tuple[LiveDetection, dict[int, StragglerAssessment]]:
    """Stream a job with a change before step 30; return the detection and its assessment after each step."""
    return watch_job(job, num_steps, lambda step: change(job) if change is not None and step == CHANGE_AT else None)


def first_with(assessments: dict[int, StragglerAssessment], is_it: Callable[[Finding], bool]) -> int | None:
    return next((step for step, assessment in assessments.items() if any(map(is_it, assessment.findings))), None)


def all_findings(assessments: dict[int, StragglerAssessment]) -> list[Finding]:
    return [finding for assessment in assessments.values() for finding in assessment.findings]


@pytest.mark.slow(kept=["10", "17", "19"])
@pytest.mark.parametrize("seed", range(20))
def test_no_straggler_is_named_where_none_is_slow(seed: int) -> None:
    _, assessments = watch(SyntheticJob(DP4, seed=seed, noise=0.04), 120)
    assert [finding for finding in all_findings(assessments) if finding.confidence is HIGH] == []


def test_no_straggler_is_named_among_many_equal_ranks() -> None:
    _, assessments = watch(SyntheticJob(Layout(dp_size=16, tp_size=2, pp_size=4), ranks_per_host=8, noise=0.05), 60)
    assert [finding for finding in all_findings(assessments) if finding.confidence is HIGH] == []


LAYOUTS = [
    DP4,
    Layout(dp_size=2, tp_size=2),
    Layout(dp_size=2, pp_size=2),
    Layout(dp_size=8, tp_size=2, pp_size=4),
]


@pytest.mark.slow(
    kept=[
        "1-pp_size=1 dp_size=4 tp_size=1",
        "1-pp_size=1 dp_size=2 tp_size=2",
        "1-pp_size=2 dp_size=2 tp_size=1",
        "0-pp_size=1 dp_size=4 tp_size=1",
    ]
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_slow_rank_is_named_within_20_steps(layout: Layout, seed: int) -> None:
    job = SyntheticJob(layout, seed=seed, noise=0.03)
    live, assessments = watch(job, CHANGE_AT + WITHIN + 1, lambda job: job.compute_factor.update({1: 1.3}))
    found = first_with(assessments, lambda assessment: assessment.confidence is HIGH)
    assert found is not None
    assert found - CHANGE_AT < WITHIN
    (finding,) = live.assessment.findings
    assert (finding.cause, finding.hosts, finding.ranks) == (Cause.COMPUTE, ("host-0",), (1,))
    assert finding.first_step == pytest.approx(CHANGE_AT, abs=2)
    assert 0.2 < finding.excess < 0.4
    assert finding.num_victims > 0
    assert 1 not in finding.victims
    assert all(one.confidence is not HIGH for step in range(CHANGE_AT) for one in assessments[step].findings)


def test_a_slow_host_is_named_with_all_its_ranks() -> None:
    live, _ = watch(SyntheticJob(DP4), 50, lambda job: job.compute_factor.update({2: 1.3, 3: 1.3}))
    (finding,) = live.assessment.findings
    assert finding.hosts == ("host-1",)
    assert set(finding.ranks) == {2, 3}
    assert "of the 2 ranks of host-1 all are slow" in finding.evidence
    assert set(finding.victims) == {0, 1}


def test_two_slow_hosts_are_one_finding() -> None:
    change: Change = lambda job: job.compute_factor.update({2: 1.3, 9: 1.3})  # noqa: E731
    live, _ = watch(SyntheticJob(Layout(dp_size=16)), 60, change)
    (finding,) = live.assessment.findings
    assert set(finding.hosts) == {"host-1", "host-4"}
    assert finding.gain_s > 0.2


PASS_S = FORWARD + BACKWARD
GAINS = {
    "a replica with 1 of 2 micro-batches computes for 1.5": ((2, 1, 1, 1, 1, 1, 1), {3: 1.5}, (3,), 0.0),
    "a replica with 9 of 10 computes for 9.99": ((10, 9, 9, 9, 9, 9, 9), {4: 1.11}, (4,), 0.0),
    "it computes for 13.5": ((10, 9, 9, 9, 9, 9, 9), {4: 1.5}, (4,), 3.5),
    "the fullest replica is slow": ((2, 1, 1, 1, 1, 1, 1), {0: 1.5}, (0,), 1.0),
    "the fullest is slow, and a slower one delays no rank": ((4, 1, 1, 1, 1, 1, 1), {0: 1.5, 3: 1.7}, (3, 0), 2.0),
    "equal replicas": ((2,) * 7, {3: 1.5}, (3,), 1.0),
    "equal replicas, two are slow": ((2,) * 7, {3: 1.5, 5: 1.25}, (3, 5), 1.0),
}
"""Micro-batches by replica, factors by rank, the ranks that are named, and the gain in passes, as steps last."""


@pytest.mark.parametrize("case", GAINS)
def test_gain_is_that_of_the_step_for_any_microbatches(case: str) -> None:
    counts, factors, named, gain = GAINS[case]
    job = SyntheticJob(
        Layout(dp_size=7), ranks_per_host=1, noise=0.0, num_microbatches=dict(enumerate(counts)), compute_factor=factors
    )
    live, _ = watch(job, 30)
    finding = next(one for one in live.assessment.findings if one.cause is Cause.COMPUTE)
    longest = max(count * factors.get(rank, 1.0) for rank, count in enumerate(counts)) - max(counts)
    assert finding.ranks == named
    assert longest == pytest.approx(gain)
    assert finding.gain_s == pytest.approx(gain * PASS_S, rel=1e-5, abs=1e-6)


def test_slow_rank_with_one_peer_is_uncertain() -> None:
    job = SyntheticJob(Layout(dp_size=2, pp_size=2), compute_factor={1: 1.3})
    _, assessments = watch(job, 50)
    found = all_findings(assessments)
    assert {one.cause for one in found} == {Cause.COMPUTE}
    assert {one.confidence for one in found} == {LOW}
    assert any("with a single peer" in sentence for sentence in found[-1].evidence)


def test_single_signal_is_not_enough() -> None:
    """A rank that computes long while no rank waits for it: its work is hidden behind something else."""
    wait = np.full(4, 0.1)
    job = SyntheticJob(DP4, compute_factor={1: 1.3})
    findings = all_findings(watch_job(job, 60, extra=lambda step: {Operation.GRADS_REDUCE_SCATTER: wait})[1])
    assert findings
    assert {finding.confidence for finding in findings} == {LOW}
    assert "the second signal does not agree" in findings[-1].evidence[1]


@pytest.mark.parametrize("dp_size", [2, 4])
def test_rank_that_waits_within_its_passes_is_a_victim(dp_size: int) -> None:
    """Within its first forward, the last stage waits for the token count of the rank whose data is late."""
    job = SyntheticJob(Layout(dp_size=dp_size), data_s={1: 0.4})
    late = np.where(np.arange(dp_size) == 1, 0.0, 0.4)
    extra = {Operation.FORWARD_COMPUTE: 0.3 + late, Operation.DP_ALL_REDUCE: late}
    live, _ = watch_job(job, 40, extra=lambda step: extra)
    (finding,) = live.assessment.findings
    assert (finding.cause, finding.ranks) == (Cause.DATA, (1,))


CAUSES: list[tuple[str, SyntheticJob, Change, Cause, tuple[str, ...]]] = [
    ("gc between steps", SyntheticJob(DP4), lambda job: job.gc_s.update({1: 0.4}), Cause.GC, ("host-0",)),
    (
        "gc within passes",
        SyntheticJob(DP4, is_gc_in_passes=True),
        lambda job: job.gc_s.update({1: 0.4}),
        Cause.GC,
        ("host-0",),
    ),
    ("late data", SyntheticJob(DP4), lambda job: job.data_s.update({2: 0.4}), Cause.DATA, ("host-1",)),
    (
        "longer sequences",
        SyntheticJob(DP4),
        lambda job: job.work_factor.update({2: 1.5}),
        Cause.LENGTHS,
        ("host-1",),
    ),
    (
        "sequences of all lengths",
        SyntheticJob(DP4),
        lambda job: setattr(job, "work_noise", 0.2),
        Cause.LENGTHS,
        (),
    ),
    (
        "a slow last stage",
        SyntheticJob(Layout(pp_size=4, dp_size=2)),
        lambda job: job.stage_factor.update({3: 1.4}),
        Cause.STAGE,
        ("host-3",),
    ),
    (
        "a slow link",
        SyntheticJob(DP4),
        lambda job: job.transfer_factor.update({"host-1": 20.0}),
        Cause.NETWORK,
        ("host-0", "host-1"),
    ),
]


@pytest.mark.slow(kept=["gc between steps", "a slow link", "gc within passes", "late data"])
@pytest.mark.parametrize(("job", "change", "cause", "hosts"), [case[1:] for case in CAUSES], ids=[c[0] for c in CAUSES])
def test_the_right_cause_is_named(job: SyntheticJob, change: Change, cause: Cause, hosts: tuple[str, ...]) -> None:
    _, assessments = watch(job, CHANGE_AT + 30, change)
    before = [
        finding for step in range(CHANGE_AT) for finding in assessments[step].findings if finding.confidence is HIGH
    ]
    assert before == []
    found = first_with(assessments, lambda assessment: assessment.cause is cause and assessment.hosts == hosts)
    assert found is not None
    assert found - CHANGE_AT < WITHIN
    sure = {finding.cause for finding in all_findings(assessments) if finding.confidence is HIGH}
    assert sure <= {cause}
    for finding in all_findings(assessments):
        assert np.isfinite(
            [finding.excess, finding.score, finding.gain_s, finding.wait_deficit_s, *finding.scores.values()]
        ).all()


@pytest.mark.slow
def test_slow_link_of_some_groups_is_certain() -> None:
    """Each pipeline stage has its own hosts, so only the groups of one stage include the slow host."""
    job = SyntheticJob(Layout(dp_size=4, pp_size=4), ranks_per_host=2)

    def slow(job: SyntheticJob) -> None:
        job.transfer_factor["host-2"] = 20.0

    live, _ = watch(job, 70, slow)
    (finding,) = live.assessment.findings
    assert finding.cause is Cause.NETWORK
    assert finding.hosts == ("host-2", "host-3")  # Stage 1 is on both hosts, and no other group is.
    job = SyntheticJob(Layout(dp_size=2, pp_size=4), ranks_per_host=2)
    live, _ = watch(job, 70, slow)
    (finding,) = live.assessment.findings
    assert (finding.confidence, finding.hosts) == (HIGH, ("host-2",))


NETWORKS = {
    "a host in all slow groups and in no other": ("abacdede", [0, 1], HIGH, "a", "no other group does"),
    "a host in all slow groups, but also in a sound one": ("abacadef", [0, 1], LOW, "a", "groups that are not slow"),
    "a group within a host that has a sound group too": ("aaaabcbc", [0], HIGH, "a", "on a single host"),
    "groups within two hosts": ("aabbcdcd", [0, 1], LOW, "ab", "on a single host"),
    "a slow group over two hosts that sound groups include": ("abacbdcd", [0], LOW, "ab", "which of these 2 hosts"),
    "slow groups without a common host": ("abcdefef", [0, 1], LOW, "abcd", "which of these 4 hosts"),
}
"""Hosts by rank, the stages with slow groups of two ranks, the confidence, the named hosts, and what the text says."""


@pytest.mark.parametrize("case", NETWORKS)
def test_network_of_a_host_is_certain_only_if_shown(case: str) -> None:
    hosts, stages, confidence, named, says = NETWORKS[case]
    job = SyntheticJob(Layout(dp_size=2, pp_size=4), hosts=hosts, noise=0.0)
    is_slow = np.isin(np.arange(8) // 2, stages)

    def extra(step: int) -> dict[Operation, Array]:
        slow_s = 0.5 if step >= CHANGE_AT else 0.0
        return {Operation.PARAMS_ALL_GATHER: is_slow * slow_s, Operation.STEP: np.full(8, 1.0 + slow_s)}

    live, _ = watch_job(job, 46, extra=extra)
    (finding,) = live.assessment.findings
    assert (finding.cause, finding.confidence, finding.hosts) == (Cause.NETWORK, confidence, tuple(named))
    assert says in finding.evidence[-1]
    assert (finding.first_step, finding.last_step, finding.num_steps, finding.num_seen) == (CHANGE_AT, 44, 15, 15)


def test_slow_network_is_found_by_elimination() -> None:
    def extra(step: int) -> dict[Operation, Array]:
        extra_s = 0.3 if step >= CHANGE_AT else 0.0
        return {Operation.FORWARD_RECV: np.full(4, 0.01 + extra_s), Operation.STEP: np.full(4, 1.0 + extra_s)}

    live, _ = watch_job(SyntheticJob(Layout(pp_size=2, dp_size=2)), 60, extra=extra)
    (finding,) = live.assessment.findings
    assert (finding.cause, finding.confidence, finding.hosts) == (Cause.NETWORK, LOW, ())
    assert finding.gain_s == pytest.approx(0.3, rel=0.1)


@pytest.mark.slow
def test_stage_that_became_slow_is_no_uneven_partition() -> None:
    job = SyntheticJob(Layout(pp_size=4, dp_size=2))
    live, _ = watch(job, 60, lambda job: job.stage_factor.update({3: 1.4}))
    assert "the stage was not slow at first" in live.assessment.findings[0].evidence[1]
    live, _ = watch(SyntheticJob(Layout(pp_size=4, dp_size=2), stage_factor={3: 1.4}), 60)
    evidence = live.assessment.findings[0].evidence[1]
    assert "the layers are partitioned unevenly" in evidence
    assert "give stage 3 fewer layers and the others more with parallel.layers_per_chunk" in evidence


def test_slow_host_with_longer_sequences_is_named() -> None:
    job = SyntheticJob(DP4, work_factor={1: 1.02})
    live, _ = watch(job, 60, lambda job: job.compute_factor.update({1: 1.3}))
    assert live.assessment.findings[0].cause is Cause.COMPUTE


def test_steps_with_checkpoints_and_the_first_ones_are_left_out() -> None:
    job, save = SyntheticJob(DP4), {Operation.CHECKPOINT: np.array([5.0, 1.0, 1.0, 1.0])}

    def before(step: int) -> None:
        job.compute_factor[0] = 3.0 if step % 5 == 0 or step < 2 else 1.0

    live, assessments = watch_job(job, 60, before, lambda step: save if step % 5 == 0 else None)
    assert all_findings(assessments) == []
    assert live.num_left_out == 13
    assert live.num_compared == 59 - 13


def test_job_that_saves_every_step_is_judged() -> None:
    job = SyntheticJob(DP4, compute_factor={1: 1.4})
    live, _ = watch_job(job, 60, extra=lambda step: {Operation.CHECKPOINT: np.full(4, 0.1)})
    assert live.assessment.findings[0].ranks == (1,)


def test_ranks_without_peers_are_not_judged() -> None:
    live, _ = watch(SyntheticJob(Layout(pp_size=2), compute_factor={1: 1.05}), 40)
    assert live.assessment.findings == ()
    assert not live.assessment.is_enough
    assert live.assessment.ranks_without_peers == (0, 1)
    live, _ = watch(SyntheticJob(DP4), 40)
    assert live.assessment.is_enough


def test_more_ranks_need_a_higher_score() -> None:
    thresholds = Thresholds()
    assert least_score(thresholds, 4) == thresholds.score
    # the greatest of 12,288 normal numbers is above 4 more often than not
    greatest = np.median([np.abs(np.random.default_rng(seed).normal(size=12288)).max() for seed in range(20)])
    assert least_score(thresholds, 12288) > greatest > thresholds.score


@pytest.mark.parametrize("slow", [Operation.FORWARD_COMPUTE, Operation.BACKWARD_WEIGHT_COMPUTE])
def test_tensor_parallel_neighbor_is_a_victim(slow: Operation) -> None:
    """The passes of a rank are as long as those of a slow rank in its tensor-parallel group."""
    job = SyntheticJob(Layout(tp_size=2, dp_size=4), ranks_per_host=2, noise=0.01)
    passes, waits = np.full(8, 0.3), np.full(8, 0.02)
    passes[[2, 3]] += 0.4
    waits[2] += 0.4
    reduce = np.where(passes > 0.5, 0.02, 0.42)
    extra = {slow: passes, Operation.TP_ALL_REDUCE: waits, Operation.GRADS_REDUCE_SCATTER: reduce}
    live, _ = watch_job(job, 40, extra=lambda step: extra)
    (finding,) = live.assessment.findings
    assert (finding.cause, finding.ranks, finding.confidence) == (Cause.COMPUTE, (3,), HIGH)
    assert 2 in finding.victims


def test_overlapping_collectives_count_a_wait_once() -> None:
    """Reductions of many buckets are awaited together: the sum of their times is many times the step, and noisy."""
    job = SyntheticJob(DP4)
    live = LiveDetection(job.roster(), Thresholds())
    random = np.random.default_rng(5)
    for step in range(60):
        job.compute_factor[1] = 1.3 if step >= CHANGE_AT else 1.0
        totals, _ = job.step(step)
        is_reduction = totals.operation == Operation.GRADS_REDUCE_SCATTER.number
        totals.sum_ns[is_reduction] += (20e9 * random.random(4)).astype(np.int64)
        live.add_totals(totals, float(step))
        live.advance(float(step))
    (finding,) = live.assessment.findings
    assert (finding.ranks, finding.confidence) == ((1,), HIGH)
