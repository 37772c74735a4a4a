"""Alarms of loss and gradient norm, and the findings that become verdicts. Pure functions: no I/O and no clock."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from megatrain.contracts.black_box.operations import StepValue
from megatrain.contracts.records.host_verdict import Cause, HostVerdict, VerdictConfidence, VerdictKind
from megatrain.contracts.records.record import decode, encode
from megatrain_diagnostics.analysis.findings import Finding
from megatrain_diagnostics.analysis.numerics import NUM_NEEDED, NumericsAlarm, NumericsWatch
from megatrain_diagnostics.controller.verdict_rules import (
    MAX_PER_HOUR,
    VerdictAuthor,
    WrittenVerdicts,
    key_of,
    verdicts_to_write,
)
from megatrain_diagnostics.events.tables import Values, joined, num_rows, select
from tests.helpers.synthetic_steps import step_values, values_of_ranks

NOW_S = 1_800_000_000.25
AUTHOR = VerdictAuthor("daemon-1", num_steps=8)
FINDING = Finding(
    cause=Cause.COMPUTE, confidence=VerdictConfidence.HIGH, ranks=(5, 4), hosts=("host-2",), first_step=100,
    last_step=110, num_steps=10, num_seen=9, excess=0.3, excess_s=0.27, score=12.0, wait_deficit_s=0.26, num_peers=6,
    victims=(0, 1), num_victims=6, step_s=1.3, gain_s=0.26, evidence=("slow",), scores={"host-2": 12.0},
)  # fmt: skip
ALARM = NumericsAlarm(80, 81, 79, True, ("loss of step 80 is not finite (nan)",))


def test_a_finding_is_reported_once_and_as_it_was() -> None:
    ((key, verdict),) = verdicts_to_write(NOW_S, [FINDING], [], WrittenVerdicts(3), AUTHOR)
    assert (verdict.kind, verdict.round, verdict.hosts, verdict.ranks) == (
        VerdictKind.STRAGGLER,
        3,
        ("host-2",),
        (5, 4),
    )
    assert verdict.verdict_id == "20270115-080000-250-r3-0"
    assert (verdict.first_step, verdict.last_step, verdict.step_s, verdict.gain_s_per_step) == (100, 110, 1.3, 0.26)
    assert decode(HostVerdict, encode(verdict), "here") == verdict
    reported = WrittenVerdicts(3).with_verdict(key, verdict)
    later = replace(FINDING, last_step=200, ranks=(4, 5))
    assert verdicts_to_write(NOW_S + 60, [later], [], reported, AUTHOR) == ()


def test_lasting_finding_is_reported_and_again_when_certain() -> None:
    low = replace(FINDING, confidence=VerdictConfidence.LOW)
    assert verdicts_to_write(NOW_S, [low], [], WrittenVerdicts(3), AUTHOR) == ()
    ((key, verdict),) = verdicts_to_write(NOW_S, [replace(low, num_seen=16)], [], WrittenVerdicts(3), AUTHOR)
    assert verdict.confidence is VerdictConfidence.LOW
    reported = WrittenVerdicts(3).with_verdict(key, verdict)
    ((key, sure),) = verdicts_to_write(NOW_S, [FINDING], [], reported, AUTHOR)
    assert sure.confidence is VerdictConfidence.HIGH
    assert verdicts_to_write(NOW_S, [replace(low, num_seen=16)], [], reported.with_verdict(key, sure), AUTHOR) == ()


def test_next_round_starts_over_but_keeps_the_pace() -> None:
    reported = WrittenVerdicts(3)
    for number in range(MAX_PER_HOUR - 1):
        ((key, verdict),) = verdicts_to_write(
            NOW_S, [replace(FINDING, hosts=(f"host-{number}",))], [], reported, AUTHOR
        )
        reported = reported.with_verdict(key, verdict)
    reported = reported.for_round(4)
    found = [replace(FINDING, hosts=(f"host-{number}",)) for number in range(3)]
    assert len(verdicts_to_write(NOW_S + 1, found, [], reported, AUTHOR)) == 1
    assert len(verdicts_to_write(NOW_S + 3601, found, [], reported, AUTHOR)) == 3


def test_the_key_of_a_verdict_is_that_of_its_finding() -> None:
    stage = replace(FINDING, cause=Cause.STAGE, stage=1, ranks=(2, 3), hosts=("a", "b"))
    nowhere = replace(FINDING, cause=Cause.LENGTHS, hosts=())
    for one in (FINDING, stage, nowhere):
        ((key, verdict),) = verdicts_to_write(NOW_S, [one], [], WrittenVerdicts(3), AUTHOR)
        assert key == one.key == key_of(verdict)
    assert len({one.key for one in (FINDING, stage, nowhere)}) == 3


def test_numeric_alarm_proposes_a_rollback() -> None:
    ((key, verdict),) = verdicts_to_write(NOW_S, [], [ALARM], WrittenVerdicts(3), AUTHOR)
    assert verdict.kind is VerdictKind.NUMERICS
    assert verdict.confidence is VerdictConfidence.HIGH
    assert (verdict.rollback_to, verdict.skip_from, verdict.skip_to) == (79, 79, 81)
    assert key == key_of(verdict)
    again = replace(ALARM, last_step=90)
    assert verdicts_to_write(NOW_S, [], [again], WrittenVerdicts(3).with_verdict(key, verdict), AUTHOR) == ()
    ((_, unsure),) = verdicts_to_write(NOW_S, [], [replace(ALARM, is_certain=False)], WrittenVerdicts(3), AUTHOR)
    assert unsure.confidence is VerdictConfidence.LOW


def test_alarms_come_first_and_numbers_are_all_different() -> None:
    found = verdicts_to_write(
        NOW_S, [FINDING, replace(FINDING, hosts=("host-3",))], [ALARM], WrittenVerdicts(3), AUTHOR
    )
    assert [verdict.kind for _, verdict in found] == [
        VerdictKind.NUMERICS,
        VerdictKind.STRAGGLER,
        VerdictKind.STRAGGLER,
    ]
    assert len({verdict.verdict_id for _, verdict in found}) == 3


def test_figures_of_a_verdict_are_finite() -> None:
    for confidence in (VerdictConfidence.HIGH, VerdictConfidence.LOW):
        finding = replace(FINDING, confidence=confidence, num_seen=99)
        ((_, verdict),) = verdicts_to_write(NOW_S, [finding], [], WrittenVerdicts(3), AUTHOR)
        assert math.isfinite(verdict.gain_s_per_step), confidence
        assert all(math.isfinite(score) for score in verdict.scores.values()), confidence
    insufficient = replace(FINDING, confidence=VerdictConfidence.INSUFFICIENT, num_seen=99)
    assert verdicts_to_write(NOW_S, [insufficient], [], WrittenVerdicts(3), AUTHOR) == ()


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
