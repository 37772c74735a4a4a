"""What of the findings becomes a verdict: a pure decision. The driver decides what follows from one.

A finding is written once for each confidence in a round: first perhaps as LOW, which is only shown, and when both
signals have agreed for long enough as HIGH. Nothing is ever taken back: verdicts are the audit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from megatrain.contracts.host_verdict import Cause, HostVerdict, VerdictConfidence, VerdictKind
from megatrain_diagnostics.analysis.findings import Finding, straggler_key
from megatrain_diagnostics.analysis.numerics import NumericsAlarm

MAX_PER_HOUR = 20
"""Verdicts that the driver and people are asked to look at."""
_HOUR_S = 3600.0
_LOW_LASTS = 2
"""A finding of low confidence is written when it lasts this many times as long as a straggler must."""
_MAX_RANKS = 64
_MAX_TOLD = 500


@dataclass(frozen=True, slots=True)
class Told:
    """Verdicts of a round that were written."""

    round: int
    keys: frozenset[tuple[str, VerdictConfidence]] = frozenset()
    times_s: tuple[float, ...] = field(default=())
    """Unix times of the newest, of all rounds."""

    def with_verdict(self, key: str, verdict: HostVerdict) -> Told:
        times = (*self.times_s, verdict.created_unix_s)[-_MAX_TOLD:]
        return replace(self, keys=self.keys | {(key, verdict.confidence)}, times_s=times)

    def for_round(self, number: int) -> Told:
        """Return what holds in another round: of what was said of another one nothing holds, but the pace does."""
        return self if number == self.round else Told(number, times_s=self.times_s)


@dataclass(frozen=True, slots=True)
class Writer:
    """Whose verdicts they are."""

    session: str
    num_steps: int
    """Thresholds.num_steps."""
    next_number: int = 0


def judge(
    now_s: float, findings: Sequence[Finding], alarms: Iterable[NumericsAlarm], told: Told, writer: Writer
) -> tuple[tuple[str, HostVerdict], ...]:
    """Return the verdicts to write now, each with its key. Alarms come first, then what costs most."""
    wanted = [*(_of_alarm(alarm) for alarm in alarms), *(_of_finding(one) for one in findings if _is_told(one, writer))]
    room = MAX_PER_HOUR - sum(now_s - _HOUR_S < at_s for at_s in told.times_s)
    chosen: list[tuple[str, HostVerdict]] = []
    keys = set(told.keys)
    for key, verdict in wanted:
        surer = VerdictConfidence.HIGH
        if (key, verdict.confidence) in keys or (key, surer) in keys or len(chosen) >= room:
            continue
        keys.add((key, verdict.confidence))
        number = writer.next_number + len(chosen)
        chosen.append((key, _signed(verdict, now_s, told.round, writer.session, number)))
    return tuple(chosen)


def key_of(verdict: HostVerdict) -> str:
    """Return the key of a verdict that was written before, by this daemon or by one before it."""
    if verdict.kind is VerdictKind.NUMERICS:
        return f"{verdict.kind.value}:{verdict.first_step}"
    if verdict.cause is Cause.STAGE:
        return straggler_key(verdict.cause, (), verdict.ranks)
    return straggler_key(verdict.cause, verdict.hosts, ())


def verdict_id(now_s: float, number: int, round_number: int) -> str:
    """Return an id that sorts by time, as incidents have it."""
    at = datetime.fromtimestamp(now_s, UTC)
    return f"{at:%Y%m%d-%H%M%S}-{at.microsecond // 1000:03d}-r{round_number}-{number}"


def _is_told(finding: Finding, writer: Writer) -> bool:
    if finding.confidence is VerdictConfidence.HIGH:
        return True
    return finding.confidence is VerdictConfidence.LOW and finding.num_seen >= _LOW_LASTS * writer.num_steps


def _of_finding(finding: Finding) -> tuple[str, HostVerdict]:
    return finding.key, HostVerdict(
        verdict_id="",
        kind=VerdictKind.STRAGGLER,
        round=0,
        cause=finding.cause,
        confidence=finding.confidence,
        created_unix_s=0.0,
        by="",
        hosts=finding.hosts,
        ranks=finding.ranks[:_MAX_RANKS],
        evidence=finding.evidence,
        first_step=finding.first_step,
        last_step=finding.last_step,
        step_s=finding.step_s,
        gain_s_per_step=finding.gain_s,
        scores=finding.scores,
    )


def _of_alarm(alarm: NumericsAlarm) -> tuple[str, HostVerdict]:
    verdict = HostVerdict(
        verdict_id="",
        kind=VerdictKind.NUMERICS,
        round=0,
        cause=Cause.UNKNOWN,
        confidence=VerdictConfidence.HIGH if alarm.is_certain else VerdictConfidence.LOW,
        created_unix_s=0.0,
        by="",
        evidence=alarm.evidence,
        first_step=alarm.first_step,
        last_step=alarm.last_step,
        rollback_to=alarm.rollback_to,
        skip_from=alarm.rollback_to,
        skip_to=alarm.last_step,
    )
    return key_of(verdict), verdict


def _signed(verdict: HostVerdict, now_s: float, round_number: int, session: str, number: int) -> HostVerdict:
    return replace(
        verdict,
        verdict_id=verdict_id(now_s, number, round_number),
        round=round_number,
        created_unix_s=now_s,
        by=session,
    )
