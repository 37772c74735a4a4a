"""The training metrics of a job, computed from rows."""

from __future__ import annotations

import math

import pytest

from megatrain.contracts.black_box.operations import Operation as Op
from megatrain.contracts.black_box.operations import StepValue
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.events.tables import Ranks, StepTotals, Values, select
from megatrain_diagnostics.metrics.readings import JobReading
from megatrain_diagnostics.metrics.training_metrics import TrainingMetrics
from tests.helpers.drawn_spans import Drawing
from tests.helpers.synthetic_steps import SyntheticJob, step_values


def reading_of(*values: tuple[StepValue, float], step_us: int | None = 500_000) -> JobReading:
    """Return the reading after one step of rank 0 with these values."""
    drawing = Drawing()
    for kind, value in ((StepValue.LOSS, 2.5), *values):
        drawing.value(kind, 0, value, step=7)
    if step_us is not None:
        drawing.total(Op.STEP, 0, step_us, step=7)
    metrics = TrainingMetrics()
    for table_kind, table in drawing.tables().items():
        metrics.consume(table_kind, table)
    return metrics.reading("my", "1.0")


def test_mfu_needs_work_time_and_peak() -> None:
    work, peak, tokens = (StepValue.MODEL_FLOPS, 2e14), (StepValue.PEAK_FLOPS, 1e15), (StepValue.TOKENS, 4096.0)
    reading = reading_of(work, peak, tokens)

    assert (reading.step, reading.loss, reading.tokens, reading.step_sum_s) == (7, 2.5, 4096, 0.5)
    assert reading.mfu == pytest.approx(0.4)
    assert reading_of(work).mfu is None
    assert reading_of(peak).mfu is None
    assert reading_of(work, peak, step_us=None).mfu is None


def reading(metrics: TrainingMetrics) -> JobReading:
    return metrics.reading("demo", "1")


def worth(step: int, **others: float) -> Values:
    named = {StepValue[name.upper()]: value for name, value in others.items()}
    return step_values(1, step, {StepValue.LOSS: 3.0, StepValue.GRAD_NORM: 1.0, **named})


def test_steps_are_counted_once_whichever_rank_reports_them() -> None:
    metrics, job = TrainingMetrics(), SyntheticJob(Layout(dp_size=4))
    for step in range(5):
        totals, _ = job.step(step)
        for rank in range(4):
            metrics.consume(StepTotals, select(totals, totals.rank == rank))
        metrics.consume(Values, worth(step, tokens=10.0))
    found = reading(metrics)
    assert (found.step, found.loss, found.tokens) == (4, 3.0, 50)
    assert sum(found.step_buckets) == 5


def test_step_that_a_rank_invents_is_ignored() -> None:
    metrics, job = TrainingMetrics(), SyntheticJob(Layout(dp_size=4))
    metrics.consume(Ranks, job.ranks())
    totals, _ = job.step(6)
    metrics.consume(StepTotals, totals)
    made_up, _ = job.step(5000)
    metrics.consume(StepTotals, select(made_up, (made_up.operation == Op.STEP.number) & (made_up.rank == 0)))
    metrics.consume(Values, worth(5000))
    assert reading(metrics).step is None
    totals, _ = job.step(7)
    metrics.consume(StepTotals, totals)
    metrics.consume(Values, worth(7))
    assert reading(metrics).step == 7
    assert sum(reading(metrics).step_buckets) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -5.0])
def test_invalid_tokens_and_flops_are_not_counted(bad: float) -> None:
    metrics, job = TrainingMetrics(), SyntheticJob(Layout(dp_size=2))
    totals, _ = job.step(1)
    metrics.consume(StepTotals, totals)
    metrics.consume(Values, worth(1, tokens=bad, model_flops=bad, peak_flops=bad))
    assert reading(metrics).mfu is None
    metrics.consume(Values, worth(2, tokens=8.0, model_flops=1e9, peak_flops=1e12))
    found = reading(metrics)
    assert (found.step, found.tokens) == (2, 8)
    assert found.mfu is not None
