"""The numbers of a job that a scrape reads, as rows make them."""

from __future__ import annotations

import pytest

from megatrain.contracts.operations import Operation as Op
from megatrain.contracts.step_values import StepValue
from megatrain_diagnostics.metrics.job_book import JobBook
from megatrain_diagnostics.metrics.readings import JobReading
from tests.helpers.drawn_spans import Drawing


def reading_of(*values: tuple[StepValue, float], step_us: int | None = 500_000) -> JobReading:
    """Return what is read after one step of rank 0 that came to these values."""
    drawing = Drawing()
    for kind, value in ((StepValue.LOSS, 2.5), *values):
        drawing.value(kind, 0, value, step=7)
    if step_us is not None:
        drawing.total(Op.STEP, 0, step_us, step=7)
    book = JobBook()
    for table_kind, table in drawing.tables().items():
        book.consume(table_kind, table)
    return book.reading("my", "1.0")


def test_mfu_is_the_work_of_a_step_by_its_time_and_the_peak_that_the_trainer_tells() -> None:
    reading = reading_of((StepValue.MODEL_FLOPS, 2e14), (StepValue.PEAK_FLOPS, 1e15), (StepValue.TOKENS, 4096.0))

    assert (reading.step, reading.loss, reading.tokens, reading.step_sum_s) == (7, 2.5, 4096, 0.5)
    assert reading.mfu == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("values", "step_us"),
    [
        (((StepValue.MODEL_FLOPS, 2e14),), 500_000),
        (((StepValue.PEAK_FLOPS, 1e15),), 500_000),
        (((StepValue.MODEL_FLOPS, 2e14), (StepValue.PEAK_FLOPS, 1e15)), None),
    ],
    ids=["no peak", "no work", "no time"],
)
def test_there_is_no_mfu_where_a_part_of_it_is_not_known(
    values: tuple[tuple[StepValue, float], ...], step_us: int | None
) -> None:
    assert reading_of(*values, step_us=step_us).mfu is None
