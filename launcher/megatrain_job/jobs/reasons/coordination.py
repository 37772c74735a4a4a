"""Reasons about coordination: a missing driver, damaged records in etcd, verdicts that wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatrain.formatting import age_text, names_text
from megatrain_job.jobs.health import Reason, ReasonCode
from megatrain_job.jobs.snapshot import JobSnapshot

UNANSWERED_S = 30.0
"""The driver answers a verdict within a second; if one waits for this long, the driver has not received it."""


def reasons_of_coordination(snapshot: JobSnapshot, now_s: float) -> Iterator[Reason]:
    """Yield the reasons that concern etcd, the driver and its decisions."""
    if snapshot.record is None and snapshot.hosts:
        text = "etcd has hosts of this job but no record of the job: its data were lost, or this is another etcd"
        yield Reason(ReasonCode.COORDINATION_LOST, text)
    for problem in snapshot.problems:
        yield Reason(ReasonCode.FILES_REMOVED, problem.text, problem.since_unix_s)
    if snapshot.etcd_alarms:
        names = names_text(snapshot.etcd_alarms)
        yield Reason(
            ReasonCode.ETCD_ALARM, f"etcd raises {names}: the driver can store no decision until the alarm is cleared"
        )
    if snapshot.hosts and not snapshot.driver:
        hint = "a host takes over" if snapshot.has_driver_candidate else f"`megatrain driver {snapshot.job}` runs"
        text = f"no driver is elected: failures are not handled until {hint}"
        yield Reason(ReasonCode.NO_DRIVER, text)
    yield from _verdicts(snapshot, now_s)
    for text in () if snapshot.report is None else snapshot.report.removed:
        yield Reason(ReasonCode.DIRECTORY_REMOVED, text)
    yield from _alarms(snapshot)
    for text in snapshot.unreadable:
        yield Reason(ReasonCode.RECORD_UNREADABLE, f"left out of this answer: {text}")


def _verdicts(snapshot: JobSnapshot, now_s: float) -> Iterator[Reason]:
    for outcome, verdict in snapshot.waiting:
        hint = f"`megatrain job approve --verdict {outcome.verdict_id}`, or dismiss"
        text = f"verdict {outcome.verdict_id} {outcome.reason} ({hint})"
        yield Reason(ReasonCode.VERDICT_WAITING, text, outcome.at_unix_s, verdict.hosts, verdict.ranks)
    for verdict in snapshot.unanswered:
        if now_s - verdict.created_unix_s > UNANSWERED_S:
            about = names_text(verdict.hosts) or "the training"
            age = age_text(verdict.created_unix_s, now_s)
            text = f"verdict {verdict.verdict_id} on {about} ({verdict.cause}) is {age} old, and no driver has answered"
            yield Reason(ReasonCode.VERDICT_UNANSWERED, text, verdict.created_unix_s, verdict.hosts, verdict.ranks)


def _alarms(snapshot: JobSnapshot) -> Iterator[Reason]:
    """Yield the driver's problems that no other reason reports already."""
    alarms = () if snapshot.report is None else snapshot.report.alarms
    held = snapshot.incidents[-1].reason if snapshot.incidents else ""
    other_texts: Sequence[str] = (*snapshot.unreadable, held)
    for text in alarms:
        if not any(name in text for name in snapshot.etcd_alarms) and not any(text in other for other in other_texts):
            yield Reason(ReasonCode.DRIVER_ALARM, f"the driver reports: {text}")
