"""Rules by which findings become verdicts. Pure functions: no I/O and no clock. The driver acts on verdicts.

A finding is written at most once per confidence in a round. LOW is only shown. The driver may act on
HIGH: of a slow rank, both signals have agreed for long enough. Verdicts are never deleted, so that they can be audited.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from megatrain.contracts.records.host_verdict import Cause, HostVerdict, VerdictConfidence, VerdictKind
from megatrain_diagnostics.analysis.findings import Finding, straggler_key
from megatrain_diagnostics.analysis.numerics import NumericsAlarm

MAX_PER_HOUR = 20
"""Limit of verdicts per hour, so that people can read all of them."""
_HOUR_S = 3600.0
_LOW_LASTS = 2
"""A LOW finding is written when the number of steps with it reaches this many times `straggler_steps`."""
_MAX_RANKS = 64
_MAX_TIMES = 500


@dataclass(frozen=True, slots=True)
class WrittenVerdicts:
    """The verdicts that were already written in a round."""

    round: int
    keys: frozenset[tuple[str, VerdictConfidence]] = frozenset()
    times_s: tuple[float, ...] = field(default=())
    """Unix times of the newest verdicts, of all rounds."""

    def with_verdict(self, key: str, verdict: HostVerdict) -> WrittenVerdicts:
        times = (*self.times_s, verdict.created_unix_s)[-_MAX_TIMES:]
        return replace(self, keys=self.keys | {(key, verdict.confidence)}, times_s=times)

    def for_round(self, number: int) -> WrittenVerdicts:
        """Return the record for another round: without the keys, but with the times, for the limit per hour."""
        return self if number == self.round else WrittenVerdicts(number, times_s=self.times_s)


@dataclass(frozen=True, slots=True)
class VerdictAuthor:
    """The daemon session that writes verdicts, and the number of its next verdict."""

    session: str
    num_steps: int
    """Thresholds.num_steps."""
    next_number: int = 0


def verdicts_to_write(
    now_s: float,
    findings: Sequence[Finding],
    alarms: Iterable[NumericsAlarm],
    written: WrittenVerdicts,
    author: VerdictAuthor,
) -> tuple[tuple[str, HostVerdict], ...]:
    """Return (key, verdict) of the verdicts to write now: alarms first, then findings, in the given order."""
    wanted = [
        *(_of_alarm(alarm) for alarm in alarms),
        *(_of_finding(finding) for finding in findings if _is_due(finding, author)),
    ]
    num_left = MAX_PER_HOUR - sum(now_s - _HOUR_S < at_s for at_s in written.times_s)
    chosen: list[tuple[str, HostVerdict]] = []
    keys = set(written.keys)
    for key, verdict in wanted:
        surer = VerdictConfidence.HIGH
        if (key, verdict.confidence) in keys or (key, surer) in keys or len(chosen) >= num_left:
            continue
        keys.add((key, verdict.confidence))
        number = author.next_number + len(chosen)
        chosen.append((key, _stamped(verdict, now_s, written.round, author.session, number)))
    return tuple(chosen)


def key_of(verdict: HostVerdict) -> str:
    """Return the key by which a verdict is recognized as already written."""
    if verdict.kind is VerdictKind.NUMERICS:
        return f"{verdict.kind.value}:{verdict.first_step}"
    if verdict.cause is Cause.STAGE:
        return straggler_key(verdict.cause, (), verdict.ranks)
    return straggler_key(verdict.cause, verdict.hosts, ())


def verdict_id(now_s: float, number: int, round_number: int) -> str:
    """Return an id that sorts by time, like the ids of incidents."""
    at = datetime.fromtimestamp(now_s, UTC)
    return f"{at:%Y%m%d-%H%M%S}-{at.microsecond // 1000:03d}-r{round_number}-{number}"


def _is_due(finding: Finding, author: VerdictAuthor) -> bool:
    if finding.confidence is VerdictConfidence.HIGH:
        return True
    return finding.confidence is VerdictConfidence.LOW and finding.num_seen >= _LOW_LASTS * author.num_steps


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


def _stamped(verdict: HostVerdict, now_s: float, round_number: int, session: str, number: int) -> HostVerdict:
    """Return a verdict with its id, round, time and author."""
    return replace(
        verdict,
        verdict_id=verdict_id(now_s, number, round_number),
        round=round_number,
        created_unix_s=now_s,
        by=session,
    )
