"""Alarms of loss and gradient norm."""

from __future__ import annotations

import numpy as np
import pytest

from megatrain.contracts.black_box.operations import StepValue
from megatrain_diagnostics.analysis.numerics import NUM_NEEDED, NumericsAlarm, NumericsWatch
from megatrain_diagnostics.events.tables import Values, joined, num_rows, select
from tests.helpers.synthetic_steps import step_values, values_of_ranks

LOSS, NORM = StepValue.LOSS, StepValue.GRAD_NORM
FACTOR = 5.0


def usual(step: int, random: np.random.Generator) -> dict[StepValue, float]:
    return {LOSS: 3.0 + 0.1 * random.normal(), NORM: abs(1.0 + 0.2 * random.normal())}


def run(
    changes: dict[int, dict[StepValue, float]], num_steps: int = 120, factor: float = FACTOR
) -> list[NumericsAlarm]:
    random, watch, alarms = np.random.default_rng(4), NumericsWatch(factor), []
    for step in range(num_steps):
        found = {**usual(step, random), **changes.get(step, {})}
        alarms += watch.add(step_values(1, step, found))
    return alarms


def test_usual_training_raises_no_alarm() -> None:
    assert run({}, 500) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_value_that_is_not_finite_is_an_alarm_at_any_step(bad: float) -> None:
    for step in (0, 80):
        (alarm,) = run({step: {LOSS: bad, NORM: bad}})
        assert (alarm.first_step, alarm.rollback_to, alarm.is_certain) == (step, step, True)
        assert "is not finite" in alarm.evidence[0]


def test_loss_jump_rolls_back_to_before_its_batch() -> None:
    (alarm,) = run({80: {LOSS: 16.0}})
    assert (alarm.first_step, alarm.last_step, alarm.rollback_to) == (80, 80, 79)
    assert alarm.is_certain
    assert "5.3 times the median" in alarm.evidence[0]
    assert run({80: {LOSS: 14.0}}) == []


def test_a_gradient_norm_has_to_last_or_the_loss_to_rise() -> None:
    (once,) = run({80: {NORM: 9.0}})
    assert not once.is_certain
    first, second = run({80: {NORM: 9.0}, 81: {NORM: 8.0}})
    assert not first.is_certain
    assert (second.first_step, second.last_step, second.rollback_to, second.is_certain) == (80, 81, 80, True)
    (with_loss,) = run({80: {NORM: 9.0, LOSS: 5.0}})
    assert with_loss.is_certain


def test_without_enough_steps_a_jump_is_not_reported() -> None:
    early = NUM_NEEDED - 2
    assert run({early: {LOSS: 40.0}}, NUM_NEEDED - 1) == []
    assert run({NUM_NEEDED + 2: {LOSS: 40.0}}) != []


def test_a_factor_of_0_switches_alarms_off() -> None:
    assert run({80: {LOSS: float("nan")}}, factor=0.0) == []


def test_jump_does_not_become_the_baseline() -> None:
    alarms = run({step: {LOSS: 40.0} for step in range(80, 120)})
    assert len(alarms) == 40
    assert {alarm.first_step for alarm in alarms} == {80}


def test_rows_twice_from_many_ranks_and_in_parts_raise_one_alarm() -> None:
    watch, random = NumericsWatch(FACTOR), np.random.default_rng(5)
    parts: list[Values] = []
    for step in range(90):
        found = {**usual(step, random), **({LOSS: float("nan")} if step == 80 else {})}
        parts += [step_values(1, step, found)] * 3
    everything = joined(Values, parts)
    alarms = []
    for rows in np.array_split(np.arange(num_rows(everything)), 37):
        alarms += watch.add(select(everything, rows))
    assert [alarm.first_step for alarm in alarms] == [80]


def test_deviating_rank_is_outvoted() -> None:
    watch, good, bad = NumericsWatch(FACTOR, 4), {LOSS: 3.0, NORM: 1.0}, {LOSS: float("nan"), NORM: 1.0}
    alarms = []
    for step in range(20):
        alarms += watch.add(values_of_ranks([0], step, bad))
        alarms += watch.add(values_of_ranks([1, 2, 3], step, good))
    assert alarms == []
    assert watch.add(values_of_ranks([0, 1], 20, bad)) != ()


def test_worse_report_of_two_ranks_counts() -> None:
    watch, good, bad = NumericsWatch(FACTOR, 4), {LOSS: 3.0, NORM: 1.0}, {LOSS: float("nan"), NORM: 1.0}
    assert watch.add(values_of_ranks([0], 0, good)) == ()
    assert watch.add(values_of_ranks([1], 0, bad)) == ()
    (alarm,) = watch.add(values_of_ranks([0, 1], 1, good))
    assert alarm.first_step == 0


def test_steps_that_a_rank_invents_hide_no_alarm() -> None:
    watch = NumericsWatch(FACTOR, 4)
    watch.add(values_of_ranks([0, 1], 5, {LOSS: 3.0, NORM: 1.0}))
    for made_up in range(500, 1600):
        watch.add(values_of_ranks([1], made_up, {LOSS: 3.0, NORM: 1.0}))
    (alarm,) = watch.add(values_of_ranks([0, 2], 6, {LOSS: float("nan"), NORM: 1.0}))
    assert alarm.first_step == 6
