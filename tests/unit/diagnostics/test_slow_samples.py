"""Ranks that compute long because of their samples: no host is blamed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.host_verdict import Cause, VerdictConfidence
from megatrain_diagnostics.analysis.findings import Finding, StragglerAssessment, Thresholds
from megatrain_diagnostics.analysis.workload import MIN_WORK_CORRELATION, pass_correlations, pearson
from megatrain_diagnostics.events.tables import Spans
from tests.helpers.synthetic_steps import SyntheticJob
from tests.helpers.table_rows import table_rows
from tests.helpers.watched_job import watch_job

HIGH, LOW = VerdictConfidence.HIGH, VerdictConfidence.LOW


def watch_compute(
    seconds_of: Callable[[int], np.ndarray], work_of: Callable[[int], dict[int, float]], num_steps: int
) -> dict[int, StragglerAssessment]:
    """Stream steps of three ranks with given compute times and squared lengths; return the assessment after each."""
    job = SyntheticJob(Layout(dp_size=3), ranks_per_host=1)

    def before(step: int) -> None:
        job.work_factor = work_of(step)

    def extra(step: int) -> dict[Operation, np.ndarray]:
        seconds = seconds_of(step)
        return {
            Operation.FORWARD_COMPUTE: seconds / 3,
            Operation.BACKWARD_COMPUTE: seconds * 2 / 3,
            Operation.GRADS_REDUCE_SCATTER: seconds.max() - seconds,
            Operation.OPTIMIZER: np.zeros(3),
            Operation.STEP: np.full(3, seconds.max() + 0.01),
        }

    return watch_job(job, num_steps, before, extra)[1]


def findings_of(assessments: dict[int, StragglerAssessment]) -> list[Finding]:
    return [finding for assessment in assessments.values() for finding in assessment.findings]


# own compute by step and rank, measured in a job; the documents of rank 2 are twice as long
MEASURED_S = 1e-3 * np.array(
    [
        [122, 140, 180],
        [112, 114, 181],
        [116, 135, 194],
        [114, 121, 182],
        [118, 123, 182],
        [129, 115, 181],
        [114, 114, 181],
        [118, 143, 182],
    ]
)


STALLS = [((), 0.0), *((ranks, stall_s) for ranks in ((0,), (0, 1), (2,)) for stall_s in (0.056, 0.3, 5.0))]


@pytest.mark.slow(kept=["()-0.0", "(0,)-0.056", "(0, 1)-0.3", "(2,)-5.0"])
@pytest.mark.parametrize(("stalled", "stall_s"), STALLS, ids=str)
def test_single_slow_steps_do_not_hide_the_samples(stalled: tuple[int, ...], stall_s: float) -> None:
    def seconds(step: int) -> np.ndarray:
        found = MEASURED_S[step % len(MEASURED_S)].copy()
        for place, rank in enumerate(stalled):
            found[rank] += stall_s if step % 8 == 2 + 3 * place else 0.0
        return found

    assessments = watch_compute(seconds, lambda _: {2: 4.0}, 40)
    sure = {(finding.cause, finding.ranks) for finding in findings_of(assessments) if finding.confidence is HIGH}
    assert sure == {(Cause.LENGTHS, (2,))}


def test_host_is_named_when_samples_no_longer_explain_it() -> None:
    equal_from = 20
    assessments = watch_compute(
        lambda step: MEASURED_S[step % len(MEASURED_S)], lambda step: {2: 4.0} if step < equal_from else {}, 60
    )
    causes = {
        step: [(finding.cause, finding.confidence) for finding in found.findings] for step, found in assessments.items()
    }
    explained = [step for step, found in causes.items() if found == [(Cause.LENGTHS, HIGH)]]
    doubtful = [step for step, found in causes.items() if found == [(Cause.COMPUTE, LOW)] and step >= equal_from]
    sure = [step for step, found in causes.items() if found == [(Cause.COMPUTE, HIGH)]]
    assert doubtful == list(range(max(explained) + 1, max(explained) + 1 + len(doubtful)))
    assert sure == list(range(doubtful[-1] + 1, 60))
    assert len(doubtful) == Thresholds().num_steps - 1
    assert "its samples explained this" in assessments[doubtful[0]].findings[0].evidence[-1]
    assert not any("its samples explained" in one for one in assessments[59].findings[0].evidence)


def test_slow_host_with_twice_the_documents_cost_is_named() -> None:
    """Half of compute is attention, so a host may be slower than its documents explain, and by less than their sum."""
    slow_from = 30
    random = np.random.default_rng(4)
    work = random.lognormal(0.0, 0.2, (70, 3)) * [1.0, 1.0, 2.0]
    seconds = (0.06 + 0.06 * work) * (1.0 + 0.01 * random.normal(size=work.shape).clip(-3, 3))

    def watch(factor: float) -> dict[int, StragglerAssessment]:
        def slowed(step: int) -> np.ndarray:
            return np.multiply(seconds[step], [1.0, 1.0, factor if step >= slow_from else 1.0])

        return watch_compute(slowed, lambda step: dict(enumerate(work[step].tolist())), len(work))

    assessments = watch(1.0)
    sure = {(one.cause, one.ranks) for one in findings_of(assessments) if one.confidence is HIGH}
    assert sure == {(Cause.LENGTHS, (2,))}
    assert not Cause.LENGTHS.is_of_host

    assessments = watch(1.3)
    (finding,) = assessments[len(work) - 1].findings
    assert (finding.cause, finding.confidence, finding.ranks, finding.hosts) == (Cause.COMPUTE, HIGH, (2,), ("host-2",))
    # the gain of another host is what the samples do not explain
    least, most = 0.2 * 0.18, 0.35 * 0.18
    assert least <= finding.gain_s <= most < finding.excess_s
    causes = {step: {one.cause for one in found.findings} for step, found in assessments.items()}
    first = min(step for step in range(slow_from, len(work)) if Cause.COMPUTE in causes[step])
    assert first - slow_from < 2 * Thresholds().num_steps


def test_pearson_agrees_with_numpy() -> None:
    random = np.random.default_rng(1)
    first = random.normal(size=50)
    second = first + random.normal(size=50)
    assert pearson(first, second) == pytest.approx(np.corrcoef(first, second)[0, 1])
    assert pearson(first, np.ones(50)) == 0.0


def passes(times: np.ndarray, *, factor: np.ndarray) -> Spans:
    """Return forward and backward of micro-batches: times [ranks, micro-batches], factors of each pass [2, ...]."""
    rank, micro = (grid.ravel() for grid in np.meshgrid(*map(range, times.shape), indexing="ij"))
    columns = {
        "rank": np.tile(rank, 2), "step": 10, "microbatch": np.tile(micro, 2),
        "operation": np.repeat([Operation.FORWARD_COMPUTE.number, Operation.BACKWARD_COMPUTE.number], len(rank)),
        "duration_ns": (np.concatenate([times.ravel(), 2 * times.ravel()]) * factor.ravel() * 1e9).astype(int),
    }  # fmt: skip
    return table_rows(Spans, columns)


def test_longer_sequences_are_distinguished_from_slow_hosts() -> None:
    random = np.random.default_rng(2)
    lengths = np.exp(0.4 * random.normal(size=(2, 32)))
    steady = 1.0 + 0.0 * lengths
    noise = 1.0 + 0.1 * random.normal(size=(2, 2, 32))
    assert (pass_correlations(passes(lengths, factor=np.ones((2, 2, 32))), 3)[:2] >= MIN_WORK_CORRELATION).all()
    assert (pass_correlations(passes(steady, factor=noise), 3) < MIN_WORK_CORRELATION).all()
    assert (pass_correlations(passes(steady, factor=np.ones((2, 2, 32))), 3) == 0.0).all()
