"""Scores step by step: never NaN, the same for any order of rows, and silent ranks are reported."""

from __future__ import annotations

import numpy as np
import pytest

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.host_verdict import Cause
from megatrain_diagnostics.analysis.findings import Thresholds
from megatrain_diagnostics.analysis.live import LiveDetection
from megatrain_diagnostics.events.tables import StepTotals, joined, num_rows, select
from tests.helpers.synthetic_steps import SyntheticJob
from tests.helpers.watched_job import watch_job

LAYOUT = Layout(dp_size=8)
SILENCE_S = 5.0
"""By the times that the test gives."""


def stream(live: LiveDetection, totals: StepTotals, now_s: float) -> None:
    live.add_totals(totals, now_s)
    live.advance(now_s)


def test_scores_are_those_of_own_compute_and_victims_have_none() -> None:
    live, _ = watch_job(SyntheticJob(LAYOUT, ranks_per_host=1, noise=0.01, compute_factor={5: 1.5}), 30)
    found = live.assessment
    assert live.step == 28
    (finding,) = found.findings
    assert (finding.ranks, found.scores[5], found.host_scores["host-5"]) == ((5,), finding.score, finding.score)
    assert found.thresholds is not None
    least = found.thresholds.score
    assert found.scores[5] >= least, "a straggler"
    assert max(score for rank, score in enumerate(found.scores) if rank != 5) < least, "all others wait for it"
    assert set(found.host_scores) == {f"host-{rank}" for rank in range(8)}


def test_rank_with_more_microbatches_is_no_straggler() -> None:
    """Of 7 replicas one computes 5 micro-batches, the others 4: a quarter more, on a healthy host."""
    microbatches = {replica: 5 if replica == 0 else 4 for replica in range(7)}
    for slow_rank in (None, 0, 5):
        factor = {} if slow_rank is None else {slow_rank: 1.5}
        job = SyntheticJob(
            Layout(dp_size=7), ranks_per_host=1, noise=0.01, num_microbatches=microbatches, compute_factor=factor
        )
        live, _ = watch_job(job, 30)
        found = [finding.ranks for finding in live.assessment.findings]
        assert found == ([] if slow_rank is None else [(slow_rank,)]), slow_rank


def test_host_that_waits_for_its_loader_is_not_slow() -> None:
    """Its finding names the data, for which no host is replaced; reads that no rank waits for are not a finding."""
    read_s = np.where(np.arange(8) == 2, 0.9, 0.0)
    for wait_s in (0.0, 0.5):
        job = SyntheticJob(LAYOUT, ranks_per_host=2, data_s={2: wait_s, 3: wait_s})
        live, _ = watch_job(job, 30, extra=lambda step: {Operation.DATA_READ: read_s})
        found = live.assessment
        assert [(one.cause, one.hosts, one.cause.is_of_host) for one in found.findings] == (
            [(Cause.DATA, ("host-1",), False)] if wait_s else []
        )
        assert found.thresholds is not None
        assert max(found.host_scores.values()) < found.thresholds.score


@pytest.mark.parametrize(
    ("read_s", "picture_s", "names"),
    [
        (0.9, 0.8, "wait 800.0 ms a step for producers of pictures, 900.0 ms of reads in all: check the producers"),
        (0.0, 0.8, "wait 800.0 ms a step for producers of pictures: check the producers"),
        (0.9, 0.3, "check the storage and the data loader of that host"),
        (0.0, 0.1, "check the storage and the data loader of that host"),
    ],
)
def test_host_that_waits_for_pictures_is_not_slow(read_s: float, picture_s: float, names: str) -> None:
    """The finding names the producers if most of the reads, and of the wait of the ranks, is theirs."""
    job = SyntheticJob(LAYOUT, ranks_per_host=2, data_s={2: 0.5, 3: 0.5})
    is_first = np.where(np.arange(8) == 2, 1.0, 0.0)
    seconds = {
        Operation.DATA_READ: read_s * is_first,
        Operation.PICTURE_WAIT: picture_s * is_first,
        Operation.PICTURE_REQUESTS: 3 * picture_s * is_first,
    }
    live, _ = watch_job(job, 30, extra=lambda step: seconds)
    (found,) = live.assessment.findings
    assert (found.cause, found.hosts, found.cause.is_of_host) == (Cause.DATA, ("host-1",), False)
    assert names in found.evidence[-1]
    assert live.assessment.thresholds is not None
    assert max(live.assessment.host_scores.values()) < live.assessment.thresholds.score


def test_silent_rank_is_reported_and_changes_no_score() -> None:
    job = SyntheticJob(LAYOUT)
    live = LiveDetection(job.roster(), Thresholds(), SILENCE_S)
    for step in range(30):
        totals, _ = job.step(step)
        silent = 3 if step >= 10 else -1
        stream(live, select(totals, totals.rank != silent), float(step))
    assert live.silent_ranks() == (3,)
    assert live.step is not None
    assert live.step >= 23
    assert np.isfinite(live.assessment.scores).all()
    assert live.assessment.scores[3] == 0.0
    assert live.assessment.findings == ()
    stream(live, job.step(30)[0], 30.0)
    stream(live, job.step(31)[0], 31.0)
    assert live.silent_ranks() == ()


def test_silent_rank_that_invented_a_step_is_reported() -> None:
    job = SyntheticJob(LAYOUT)
    live = LiveDetection(job.roster(), Thresholds(), SILENCE_S)
    for step in range(40):
        totals, _ = job.step(step)
        stream(live, select(totals, totals.rank != 3) if step >= 10 else totals, float(step))
        if step == 10:
            made_up, _ = job.step(2**31 - 1)
            stream(live, select(made_up, made_up.rank == 3), float(step))
    assert live.silent_ranks() == (3,)
    for step in range(40, 50):
        stream(live, job.step(step)[0], float(step))
    assert live.silent_ranks() == ()


def test_steps_without_any_compute_or_time_give_finite_scores() -> None:
    job = SyntheticJob(LAYOUT)
    live = LiveDetection(job.roster(), Thresholds())
    for step in range(30):
        totals, _ = job.step(step)
        totals.sum_ns[:] = 0
        stream(live, totals, float(step))
    assert len(live.assessment.scores) == 8
    assert np.isfinite(live.assessment.scores).all()
    assert live.assessment.findings == ()
    only_steps = SyntheticJob(LAYOUT)
    live = LiveDetection(only_steps.roster(), Thresholds())
    for step in range(30):
        totals, _ = only_steps.step(step)
        stream(live, select(totals, totals.operation == Operation.STEP.number), float(step))
    assert len(live.assessment.scores) == 8
    assert np.isfinite(live.assessment.scores).all()


def test_findings_do_not_depend_on_the_order_of_rows() -> None:
    assessments = []
    for seed in (None, 1, 2):
        job = SyntheticJob(LAYOUT, compute_factor={2: 1.3})
        live = LiveDetection(job.roster(), Thresholds())
        kept = joined(StepTotals, [])
        for step in range(40):
            totals, values = job.step(step)
            live.add_values(values)
            kept = joined(StepTotals, [kept, totals])
            if step % 5 == 4:  # five steps at once, in any order
                order = np.arange(num_rows(kept))
                if seed is not None:
                    np.random.default_rng(seed).shuffle(order)
                stream(live, select(kept, order), float(step))
                kept = joined(StepTotals, [])
        assessments.append(live.assessment)
    assert assessments[0].findings
    assert assessments[0] == assessments[1] == assessments[2]
