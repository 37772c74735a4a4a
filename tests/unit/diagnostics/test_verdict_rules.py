"""The findings that become verdicts. Pure functions: no I/O and no clock."""

from __future__ import annotations

import math
from dataclasses import replace

from megatrain.contracts.records.host_verdict import Cause, HostVerdict, VerdictConfidence, VerdictKind
from megatrain.contracts.records.record import decode, encode
from megatrain_diagnostics.analysis.findings import Finding
from megatrain_diagnostics.analysis.numerics import NumericsAlarm
from megatrain_diagnostics.controller.verdict_rules import (
    MAX_PER_HOUR,
    VerdictAuthor,
    WrittenVerdicts,
    key_of,
    verdicts_to_write,
)

NOW_S = 1_800_000_000.25
AUTHOR = VerdictAuthor("daemon-1", num_steps=8)
FINDING = Finding(
    cause=Cause.COMPUTE,
    confidence=VerdictConfidence.HIGH,
    ranks=(5, 4),
    hosts=("host-2",),
    first_step=100,
    last_step=110,
    num_steps=10,
    num_seen=9,
    excess=0.3,
    excess_s=0.27,
    score=12.0,
    wait_deficit_s=0.26,
    num_peers=6,
    victims=(0, 1),
    num_victims=6,
    step_s=1.3,
    gain_s=0.26,
    evidence=("slow",),
    scores={"host-2": 12.0},
)
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
