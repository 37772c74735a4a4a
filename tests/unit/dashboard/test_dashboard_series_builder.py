"""The series of steps: which rows are confirmed, which steps a restart withdraws, and which of many steps are kept."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from megatrain.contracts.black_box.operations import StepValue
from megatrain_dashboard.api.overview.series_view import series_document
from megatrain_dashboard.sources.series_builder import SeriesBuilder, SeriesSnapshot
from megatrain_dashboard.sources.window import WHOLE_RUN, Window
from megatrain_diagnostics.analysis.effective_time import Restart
from megatrain_diagnostics.events.tables import StepTotals, Values, from_columns, joined, select
from tests.helpers.synthetic_steps import values_of_ranks

RANKS = (0, 1, 2)
SECOND_NS = 10**9


def values_at(step: int, loss: float = 2.0, *, ranks: tuple[int, ...] = RANKS, round_number: int = 1) -> Values:
    worth = {StepValue.LOSS: loss, StepValue.GRAD_NORM: 1.0, StepValue.TOKENS: 100.0}
    values = values_of_ranks(ranks, step, worth, round_number)
    return replace(values, at_ns=np.full_like(values.at_ns, (round_number * 10_000 + step + 1) * SECOND_NS))


def timed(step: int, *, ranks: tuple[int, ...] = RANKS, round_number: int = 1) -> StepTotals:
    num = len(ranks)
    return from_columns(
        StepTotals,
        {
            "round": [round_number] * num, "rank": list(ranks), "sequence": [step] * num, "step": [step] * num,
            "operation": [1] * num, "start_ns": [(round_number * 10_000 + step) * SECOND_NS] * num,
            "sum_ns": [10**9] * num, "max_ns": [0] * num, "count": [1] * num, "num_bytes": [0] * num,
        },
    )  # fmt: skip


def enter(
    builder: SeriesBuilder, steps: range, *, round_number: int = 1, losses: dict[int, float] | None = None
) -> None:
    named = losses or {}
    values = joined(Values, [values_at(step, named.get(step, 2.0), round_number=round_number) for step in steps])
    totals = joined(StepTotals, [timed(step, round_number=round_number) for step in steps])
    builder.take(values, totals)


def begun(capacity: int = 1024) -> SeriesBuilder:
    builder = SeriesBuilder(capacity)
    builder.begin(1, len(RANKS), 0)
    return builder


def shown(
    series: SeriesSnapshot, points: int = 600, window: Window = WHOLE_RUN, round_number: int | None = None
) -> dict[str, list[float | None]]:
    part = series.between(window.first_step, window.last_step)
    document = series_document(part, round_number=round_number, window=window, points=points)
    return document.model_dump(mode="json")


def test_step_is_entered_when_a_second_rank_confirms_it() -> None:
    builder = begun()
    everything = joined(Values, [values_at(0), values_at(1), values_at(2, ranks=(1,))])
    assert builder.take(everything, joined(StepTotals, [timed(0), timed(1), timed(2, ranks=(1,))])) == 2
    assert builder.next_step == 2
    # A rank that is thousands of steps ahead of the others is implausible.
    assert builder.take(values_at(5000, ranks=(2,)), timed(5000, ranks=(2,))) == 0
    assert builder.take(joined(Values, [values_at(2), values_at(3)]), joined(StepTotals, [timed(2), timed(3)])) == 2
    assert builder.snapshot().column("last").tolist() == [0, 1, 2, 3]


def test_every_step_of_a_lone_rank_is_confirmed() -> None:
    builder = SeriesBuilder()
    builder.begin(1, 1, 0)
    assert builder.take(values_at(0, ranks=(0,)), timed(0, ranks=(0,))) == 1


def test_values_wait_for_their_sums_for_eight_steps() -> None:
    builder = begun()
    values = joined(Values, [values_at(step) for step in range(12)])
    assert builder.take(values, joined(StepTotals, [timed(0)])) == 4
    rest = select(values, values.step >= 4)
    assert builder.take(rest, joined(StepTotals, []), is_last=True) == 8
    # Without sums, the time between the ends of two steps counts.
    assert builder.snapshot().column("step_s").tolist()[1:4] == [1.0] * 3


def test_sums_wait_for_their_values_too() -> None:
    builder = begun()
    totals = joined(StepTotals, [timed(step) for step in range(6)])
    assert builder.take(joined(Values, [values_at(0), values_at(1)]), totals) == 2
    later = joined(StepTotals, [timed(step) for step in range(2, 13)])
    assert builder.take(joined(Values, []), later) == 3
    assert np.isnan(builder.snapshot().column("loss")).tolist() == [False, False, True, True, True]


def test_median_over_ranks_counts() -> None:
    builder = begun()
    builder.take(joined(Values, [values_at(0, 2.0, ranks=(0, 1)), values_at(0, 900.0, ranks=(2,))]), timed(0))
    assert builder.snapshot().newest("loss") == 2.0
    assert builder.snapshot().bad_steps == ()


def test_loss_that_is_not_finite_is_null_and_its_step_is_bad() -> None:
    builder = begun()
    enter(builder, range(5), losses={2: math.nan, 3: math.inf})
    document = shown(builder.snapshot())
    assert document["loss"] == [2.0, 2.0, None, None, 2.0]
    assert document["bad_steps"] == [2, 3]
    assert shown(builder.snapshot(), window=Window(3, 3))["bad_steps"] == [3]


def test_a_later_round_replaces_the_steps_that_it_repeats() -> None:
    builder = begun()
    enter(builder, range(20))
    builder.begin(2, len(RANKS), 0)
    enter(builder, range(10, 13), round_number=2, losses={10: 1.5})
    series = builder.snapshot()
    assert series.column("last").tolist() == list(range(13))
    assert series.column("round").tolist() == [1] * 10 + [2] * 3
    assert series.column("loss")[10] == 1.5
    # from the end of step 9 in round 1 to the beginning of step 10 in round 2
    assert series.restarts == (Restart(1, 10_010.0, 20_010.0),)
    assert series.reached == ((1, 0, 19), (2, 10, 12))
    assert shown(series, round_number=2)["step"] == [10, 11, 12]


def test_repeated_bad_step_is_no_longer_bad() -> None:
    builder = begun()
    enter(builder, range(5), losses={1: math.nan, 4: math.nan})
    builder.begin(2, len(RANKS), 0)
    enter(builder, range(3, 6), round_number=2)
    assert builder.snapshot().bad_steps == (1,)


def test_next_round_without_repeated_steps_removes_no_point() -> None:
    builder = begun()
    enter(builder, range(5))
    builder.begin(2, len(RANKS), 0)
    enter(builder, range(5, 8), round_number=2)
    assert len(builder.snapshot()) == 8
    assert builder.snapshot().restarts == (Restart(1, 10_005.0, 20_005.0),)


def test_the_oldest_steps_become_coarse_and_no_extreme_is_lost() -> None:
    builder = begun(capacity=64)
    losses = {3: 50.0, 4: -50.0}
    for step in range(0, 1000, 10):
        enter(builder, range(step, step + 10), losses=losses)
    series = builder.snapshot()
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
    builder = begun(capacity=64)
    enter(builder, range(200))
    first_span = int(builder.snapshot().column("last")[0])
    assert first_span >= 2
    builder.begin(2, len(RANKS), 0)
    enter(builder, range(1, 5), round_number=2)
    series = builder.snapshot()
    assert series.column("last").tolist() == [0, 1, 2, 3, 4]
    assert series.column("tokens").tolist()[0] == pytest.approx(100.0)
    (restart,) = series.restarts
    assert (restart.begin_s, restart.end_s) == (pytest.approx(10_001.0), 20_001.0)


def test_chart_has_at_most_the_requested_points() -> None:
    builder = begun()
    enter(builder, range(500), losses={321: 99.0, 322: -9.0})
    for points in (2, 7, 50, 600):
        document = shown(builder.snapshot(), points)
        assert len(document["step"]) <= points
        assert document["step"][-1] == 499
        assert max(value for value in document["loss_high"] if value is not None) == 99.0, points
        assert min(value for value in document["loss_low"] if value is not None) == -9.0, points
        assert document["stride"] == max(1, -(-500 // points))
        assert set(document["tokens_per_s"]) == {100.0}


def test_chart_without_steps_is_empty() -> None:
    assert shown(SeriesBuilder().snapshot())["step"] == []
