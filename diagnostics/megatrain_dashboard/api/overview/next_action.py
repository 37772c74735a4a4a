"""Determines what happens next if no person acts, and why, from driver, diagnosis and configuration."""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.config.config import Config
from megatrain.contracts.records.host_verdict import OutcomeKind, VerdictConfidence, VerdictKind
from megatrain.formatting import names_text, seconds_text
from megatrain_dashboard.api.overview.document import NextAction
from megatrain_job.jobs.assessment import Assessment
from megatrain_job.jobs.incident_phrases import current_phase
from megatrain_job.jobs.job_state import OVER, JobState, open_incident
from megatrain_job.jobs.snapshot import JobSnapshot
from megatrain_job.jobs.verdict_cases import VerdictWithOutcome

NOTHING = "nothing"


def next_action(
    snapshot: JobSnapshot,
    assessment: Assessment,
    cases: Iterable[VerdictWithOutcome],
    config: Config | None,
    *,
    step: int | None,
    step_s: float | None,
) -> NextAction:
    """Return what happens next if no person acts. `step`: newest completed step; `step_s`: seconds per step."""
    if assessment.state in OVER:
        return NextAction(what=NOTHING, why=assessment.headline, verdict_id="")
    driver_reason = "" if snapshot.report is None else snapshot.report.reason
    incident = open_incident(snapshot)
    if incident is not None:
        phase = current_phase(incident)
        what = f"{incident.action}: {phase}" if phase else incident.action
        return NextAction(what=what, why=driver_reason or incident.reason, verdict_id=incident.verdict)
    if assessment.state is not JobState.TRAINING:
        return NextAction(what=driver_reason or assessment.headline, why=assessment.headline, verdict_id="")
    if snapshot.waiting:
        outcome, verdict = snapshot.waiting[-1]
        hosts = names_text(verdict.hosts)
        what = f"evict {hosts}, once a person approves it" if hosts else "act, once a person approves it"
        return NextAction(what=what, why=outcome.reason, verdict_id=outcome.verdict_id)
    case = _newest_case(snapshot, cases)
    if case is not None and case.verdict is not None and case.outcome is None:
        why = f"verdict {case.verdict_id}: {names_text(case.verdict.evidence[:1]) or case.verdict.cause}"
        doubt = "" if config is None or config.diagnostics.eviction == "automatic" else _mode_text(config)
        return NextAction(what=f"evict {names_text(case.verdict.hosts)}{doubt}", why=why, verdict_id=case.verdict_id)
    return _of_training(config, driver_reason, _why_not(case), step=step, step_s=step_s)


def _newest_case(snapshot: JobSnapshot, cases: Iterable[VerdictWithOutcome]) -> VerdictWithOutcome | None:
    """Return the newest case of the running round that could lead to the eviction of hosts."""
    newest = snapshot.newest_round
    found: VerdictWithOutcome | None = None
    for case in cases:
        verdict = case.verdict
        if (
            newest is None
            or verdict is None
            or verdict.round != newest.number
            or verdict.kind is not (VerdictKind.STRAGGLER)
        ):
            continue
        if verdict.confidence is VerdictConfidence.HIGH and verdict.cause.is_of_host and verdict.hosts:
            found = case
    return found


def _mode_text(config: Config) -> str:
    if config.diagnostics.eviction == "approval":
        return ", once a person approves it (diagnostics.eviction)"
    return ", if diagnostics.eviction were not dry-run"


def _why_not(case: VerdictWithOutcome | None) -> str:
    """Return why no host is evicted although a verdict is certain; empty where there is none or the driver acted."""
    if case is None or case.verdict is None or case.outcome is None or case.outcome.kind is OutcomeKind.ACTED:
        return ""
    hosts = case.verdict.hosts
    are = "is" if len(hosts) == 1 else "are"
    return f"{names_text(hosts)} {are} not evicted: {case.outcome.reason} (verdict {case.verdict_id})"


def _of_training(
    config: Config | None, driver_reason: str, why_not: str, *, step: int | None, step_s: float | None
) -> NextAction:
    if config is None or step is None:
        return NextAction(what=NOTHING, why=why_not or driver_reason or "training continues", verdict_id="")
    interval, end = config.checkpoint.interval, config.train.steps
    saving = config.checkpoint
    if saving.is_by_time and step < end and (step_s is None or (end - step) * step_s > saving.interval_s):
        why = f"checkpoint.interval_s={saving.interval_s:g}"
        return NextAction(
            what=f"save a checkpoint within {seconds_text(saving.interval_s)} of the last one",
            why="; ".join(text for text in (why, why_not) if text),
            verdict_id="",
        )
    due = (step // interval + 1) * interval if interval else end
    if step >= end or (due >= end and not config.checkpoint.save_at_end):
        return NextAction(what=f"end at step {end:,}", why=why_not or "train.steps", verdict_id="")
    due = min(due, end)
    reason = (
        f"checkpoint.interval={interval}" if interval and due < end else f"the last step is saved, train.steps={end}"
    )
    soon = "" if step_s is None else f", in about {seconds_text((due - step) * step_s)}"
    why = "; ".join(text for text in (f"{reason}{soon}", why_not) if text)
    return NextAction(what=f"save a checkpoint at step {due:,}", why=why, verdict_id="")
