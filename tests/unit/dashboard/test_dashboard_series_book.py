"""The series of steps: which rows are confirmed, what a restart takes back, what is kept of many steps."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from megatrain.contracts.step_values import StepValue
from megatrain_diagnostics.analysis.effective_time import Restart
from megatrain_diagnostics.dashboard.pages.overview.series_view import series_document
from megatrain_diagnostics.dashboard.sources.series_book import SeriesBook, SeriesSnapshot
from megatrain_diagnostics.dashboard.sources.window import WHOLE_RUN, Window
from megatrain_diagnostics.events.tables import StepTotals, Values, from_columns, joined, select
from tests.helpers.synthetic_steps import values_told_by

RANKS = (0, 1, 2)
SECOND_NS = 10**9


def told(step: int, loss: float = 2.0, *, ranks: tuple[int, ...] = RANKS, round_number: int = 1) -> Values:
    worth = {StepValue.LOSS: loss, StepValue.GRAD_NORM: 1.0, StepValue.TOKENS: 100.0}
    values = values_told_by(ranks, step, worth, round_number)
    return replace(values, at_ns=np.full_like(values.at_ns, (round_number * 10_000 + step + 1) * SECOND_NS))


def timed(step: int, seconds: float = 1.0, *, ranks: tuple[int, ...] = RANKS, round_number: int = 1) -> StepTotals:
    num = len(ranks)
    return from_columns(
        StepTotals,
        {
            "round": [round_number] * num, "rank": list(ranks), "sequence": [step] * num, "step": [step] * num,
            "operation": [1] * num, "start_ns": [(round_number * 10_000 + step) * SECOND_NS] * num,
            "sum_ns": [int(seconds * 1e9)] * num, "max_ns": [0] * num, "count": [1] * num, "num_bytes": [0] * num,
        },
    )  # fmt: skip


def enter(book: SeriesBook, steps: range, *, round_number: int = 1, losses: dict[int, float] | None = None) -> None:
    named = losses or {}
    values = joined(Values, [told(step, named.get(step, 2.0), round_number=round_number) for step in steps])
    totals = joined(StepTotals, [timed(step, round_number=round_number) for step in steps])
    book.take(values, totals)


def begun(capacity: int = 1024) -> SeriesBook:
    book = SeriesBook(capacity)
    book.begin(1, len(RANKS), 0)
    return book


def shown(
    series: SeriesSnapshot, points: int = 600, window: Window = WHOLE_RUN, round_number: int | None = None
) -> dict[str, list[float | None]]:
    part = series.between(window.first_step, window.last_step)
    document = series_document(part, round_number=round_number, window=window, points=points)
    return document.model_dump(mode="json")


def test_a_step_is_entered_when_a_second_rank_tells_of_it_or_of_a_later_one() -> None:
    book = begun()
    everything = joined(Values, [told(0), told(1), told(2, ranks=(1,))])
    assert book.take(everything, joined(StepTotals, [timed(0), timed(1), timed(2, ranks=(1,))])) == 2
    assert book.next_step == 2
    # a rank that is thousands of steps ahead of the others has made that up
    assert book.take(told(5000, ranks=(2,)), timed(5000, ranks=(2,))) == 0
    assert book.take(joined(Values, [told(2), told(3)]), joined(StepTotals, [timed(2), timed(3)])) == 2
    assert book.snapshot().column("last").tolist() == [0, 1, 2, 3]


def test_of_a_job_with_one_rank_all_is_believed() -> None:
    book = SeriesBook()
    book.begin(1, 1, 0)
    assert book.take(told(0, ranks=(0,)), timed(0, ranks=(0,))) == 1


def test_values_wait_for_their_sums_for_eight_steps_and_no_longer() -> None:
    book = begun()
    values = joined(Values, [told(step) for step in range(12)])
    assert book.take(values, joined(StepTotals, [timed(0)])) == 4
    rest = select(values, values.step >= 4)
    assert book.take(rest, joined(StepTotals, []), is_last=True) == 8
    # without sums the time between the ends of two steps counts
    assert book.snapshot().column("step_s").tolist()[1:4] == [1.0] * 3


def test_sums_wait_for_their_values_too() -> None:
    book = begun()
    totals = joined(StepTotals, [timed(step) for step in range(6)])
    assert book.take(joined(Values, [told(0), told(1)]), totals) == 2
    later = joined(StepTotals, [timed(step) for step in range(2, 13)])
    assert book.take(joined(Values, []), later) == 3
    assert np.isnan(book.snapshot().column("loss")).tolist() == [False, False, True, True, True]


def test_of_what_several_ranks_tell_the_middle_counts() -> None:
    book = begun()
    book.take(joined(Values, [told(0, 2.0, ranks=(0, 1)), told(0, 900.0, ranks=(2,))]), timed(0))
    assert book.snapshot().newest("loss") == 2.0
    assert book.snapshot().bad_steps == ()


def test_no_number_becomes_null_and_is_named() -> None:
    book = begun()
    enter(book, range(5), losses={2: math.nan, 3: math.inf})
    document = shown(book.snapshot())
    assert document["loss"] == [2.0, 2.0, None, None, 2.0]
    assert document["bad_steps"] == [2, 3]
    assert shown(book.snapshot(), window=Window(3, 3))["bad_steps"] == [3]


def test_a_later_round_takes_back_what_it_does_again() -> None:
    book = begun()
    enter(book, range(20))
    book.begin(2, len(RANKS), 0)
    enter(book, range(10, 13), round_number=2, losses={10: 1.5})
    series = book.snapshot()
    assert series.column("last").tolist() == list(range(13))
    assert series.column("round").tolist() == [1] * 10 + [2] * 3
    assert series.column("loss")[10] == 1.5
    # from the end of step 9 in round 1 to the begin of step 10 in round 2
    assert series.restarts == (Restart(1, 10_010.0, 20_010.0),)
    assert series.reached == ((1, 0, 19), (2, 10, 12))
    assert shown(series, round_number=2)["step"] == [10, 11, 12]


def test_a_bad_step_that_is_done_again_is_bad_no_more() -> None:
    book = begun()
    enter(book, range(5), losses={1: math.nan, 4: math.nan})
    book.begin(2, len(RANKS), 0)
    enter(book, range(3, 6), round_number=2)
    assert book.snapshot().bad_steps == (1,)


def test_a_round_that_goes_on_where_the_other_ended_takes_nothing_back() -> None:
    book = begun()
    enter(book, range(5))
    book.begin(2, len(RANKS), 0)
    enter(book, range(5, 8), round_number=2)
    assert len(book.snapshot()) == 8
    assert book.snapshot().restarts == (Restart(1, 10_005.0, 20_005.0),)


def test_the_oldest_steps_become_coarse_and_no_extreme_is_lost() -> None:
    book = begun(capacity=64)
    losses = {3: 50.0, 4: -50.0}
    for step in range(0, 1000, 10):
        enter(book, range(step, step + 10), losses=losses)
    series = book.snapshot()
    assert len(series) <= 64
    first, last = series.column("first"), series.column("last")
    assert first[0] == 0
    assert last[-1] == 999
    assert (first[1:] == last[:-1] + 1).all()
    assert series.column("loss_high")[0] == 50.0
    assert series.column("loss_low")[0] == -50.0
    assert (last - first)[0] > (last - first)[-1] == 0
    assert np.nansum(series.column("tokens")) == 1000 * 100.0
    assert np.nansum(series.column("sum_s")) == pytest.approx(1000.0)
    assert series.column("tokens_per_s").tolist() == [100.0] * len(series)


def test_a_restart_into_a_coarse_entry_keeps_its_part() -> None:
    book = begun(capacity=64)
    enter(book, range(200))
    first_span = int(book.snapshot().column("last")[0])
    assert first_span >= 2
    book.begin(2, len(RANKS), 0)
    enter(book, range(1, 5), round_number=2)
    series = book.snapshot()
    assert series.column("last").tolist() == [0, 1, 2, 3, 4]
    assert series.column("tokens").tolist()[0] == pytest.approx(100.0)
    (restart,) = series.restarts
    assert (restart.begin_s, restart.end_s) == (pytest.approx(10_001.0), 20_001.0)


@pytest.mark.parametrize("points", [2, 7, 50, 600])
def test_a_chart_gets_no_more_points_than_it_asks_for_with_extremes(points: int) -> None:
    book = begun()
    enter(book, range(500), losses={321: 99.0, 322: -9.0})
    document = shown(book.snapshot(), points)
    assert len(document["step"]) <= points
    assert document["step"][-1] == 499
    assert max(value for value in document["loss_high"] if value is not None) == 99.0
    assert min(value for value in document["loss_low"] if value is not None) == -9.0
    assert document["stride"] == max(1, -(-500 // points))
    assert set(document["tokens_per_s"]) == {100.0}


def test_nothing_is_an_empty_chart() -> None:
    assert shown(SeriesBook().snapshot())["step"] == []
