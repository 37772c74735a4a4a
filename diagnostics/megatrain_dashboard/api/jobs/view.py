"""Makes the rows of /jobs. Pure functions: no I/O and no clock.

`assess` judges a job whose state is in etcd, and `run_state_of` judges all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.contracts.natural_order import natural_order
from megatrain_dashboard.api.jobs.document import JobRow, RowReason, Severity, SeverityCounts
from megatrain_dashboard.sources.runs.job_seen import JobSeen, TimeSpent, incidents_of, time_of
from megatrain_dashboard.sources.runs.metrics_history import Outline
from megatrain_job.jobs.assessment import Assessment, assess
from megatrain_job.jobs.health import Health, HealthLevel, Reason, ReasonCode
from megatrain_job.jobs.run_state import RunKind
from megatrain_job.jobs.snapshot import JobSnapshot

FRESH_FAILURE_S = 86_400.0
"""A job that broke or is unreachable keeps its health level for this long; after that it counts as ended."""
_MAX_REASONS = 3
_ORDER: dict[Severity, int] = {"red": 0, "amber": 1, "green": 2, "ended": 3}
_SEVERITY_OF: dict[HealthLevel, Severity] = {
    HealthLevel.RED: "red", HealthLevel.AMBER: "amber", HealthLevel.GREEN: "green",
}  # fmt: skip
_NOTHING = Outline()


@dataclass(frozen=True, slots=True)
class Choice:
    """Selects jobs. `severity`: empty for all. `text`: must occur in one of the texts of a job."""

    severity: str = ""
    text: str = ""
    order: str = "severity"
    first: int = 0
    count: int = 100


@dataclass(frozen=True, slots=True)
class _RowState:
    """The state of a job, from etcd or from its run directory."""

    state: str
    headline: str
    health: Health
    is_over: bool


def chosen_rows(rows: Sequence[JobRow], choice: Choice) -> list[JobRow]:
    """Return all rows that match a choice, in its order, without a limit on their number."""
    found = [row for row in rows if choice.severity in ("", row.severity) and _contains(row, choice.text.casefold())]
    if choice.order == "name":
        return sorted(found, key=lambda row: natural_order(row.name))
    if choice.order == "newest":
        return sorted(found, key=lambda row: -(row.began_unix_s or 0.0))
    return sorted(found, key=lambda row: (_ORDER[row.severity], -_when_s(row), natural_order(row.name)))


def counts_of(rows: Sequence[JobRow]) -> SeverityCounts:
    counts = Counter(row.severity for row in rows)
    return SeverityCounts(red=counts["red"], amber=counts["amber"], green=counts["green"], ended=counts["ended"])


def job_row(seen: JobSeen, now_s: float) -> JobRow:
    """Return the row of a job."""
    summary = seen.summary
    snapshot, spent = seen.snapshot, time_of(seen, now_s)
    assessment = None if snapshot is None or seen.poll is None else assess(snapshot, now_s, seen.poll.unreachable)
    row_state = _row_state(seen, assessment)
    outline = _NOTHING if summary is None else summary.outline
    step, train_steps = _step(assessment, outline), _train_steps(seen, snapshot)
    step_s = outline.step_s
    if step_s is None and assessment is not None:
        step_s = assessment.progress.median_step_s
    saved_step, saved_s = _saved(seen, snapshot)
    newest = None if snapshot is None else snapshot.newest_round
    reasons = row_state.health.reasons
    is_going = not row_state.is_over and step is not None and train_steps is not None and step_s is not None
    return JobRow.of(
        outline,
        name=seen.name,
        job=snapshot.job if snapshot is not None else summary.job if summary is not None else seen.name,
        severity=_severity(seen, row_state, spent, now_s),
        level=row_state.health.level.value,
        state=row_state.state,
        headline=row_state.headline,
        reasons=tuple(RowReason.of(reason, level=reason.level.value) for reason in reasons[:_MAX_REASONS]),
        num_reasons=len(reasons),
        problems=() if summary is None else summary.problems,
        is_live=snapshot is not None,
        is_over=row_state.is_over,
        step=step,
        train_steps=train_steps,
        remaining_s=max(0, (train_steps or 0) - (step or 0)) * (step_s or 0.0) if is_going else None,
        step_s=step_s,
        effective_time_ratio=spent.ratio,
        training_s=spent.training_s,
        saved_step=saved_step,
        saved_unix_s=saved_s,
        num_hosts=None if newest is None else len(newest.hosts),
        num_ranks=outline.num_ranks if newest is None else newest.world_size,
        num_incidents=max(len(incidents_of(seen)), 0 if summary is None else summary.num_incidents),
        began_unix_s=spent.begin_s,
        ended_unix_s=spent.end_s,
        run_directory=_run_directory(seen, snapshot),
        why_not_opened=why_not_opened(seen),
        url="" if snapshot is None else snapshot.dashboard_url,
    )


def why_not_opened(seen: JobSeen) -> str:
    """Return why a job has no page here, empty where it has one."""
    if seen.summary is None:
        return "its run directory is not on this machine"
    if not seen.summary.facts.is_run:
        return seen.summary.problems[0] if seen.summary.problems else "its run directory contains no run"
    return ""


def _row_state(seen: JobSeen, assessment: Assessment | None) -> _RowState:
    if assessment is not None:
        return _RowState(str(assessment.state), assessment.headline, assessment.health, assessment.is_over)
    if seen.summary is None:
        unreachable = None if seen.poll is None else seen.poll.unreachable
        why = "etcd has no record of it" if unreachable is None else unreachable.why
        health = Health() if unreachable is None else Health((unreachable.reason,))
        return _RowState(str(RunKind.UNREACHABLE), why, health, is_over=False)
    summary = seen.summary
    if not summary.facts.is_run and summary.problems:
        reason = Reason(ReasonCode.RECORD_UNREADABLE, summary.problems[0])
        return _RowState("damaged", summary.problems[0], Health((reason,)), is_over=True)
    found = summary.run_state
    is_over = found.kind not in (RunKind.RUNNING, RunKind.UNREACHABLE)
    return _RowState(found.state, found.headline, found.health, is_over)


def _severity(seen: JobSeen, row_state: _RowState, spent: TimeSpent, now_s: float) -> Severity:
    level = row_state.health.level
    has_launch = seen.snapshot is not None or (seen.summary is not None and seen.summary.facts.is_held)
    if has_launch and not row_state.is_over:
        return _SEVERITY_OF[level]
    last_s = _last_sign_s(seen, spent)
    if level is HealthLevel.GREEN or last_s is None or now_s - last_s >= FRESH_FAILURE_S:
        return "ended"
    return _SEVERITY_OF[level]


def _last_sign_s(seen: JobSeen, spent: TimeSpent) -> float | None:
    """Return when a job ended; where that is not recorded, when it last wrote a file."""
    if seen.summary is None or seen.summary.facts.exit_code is not None:
        return spent.end_s
    return max(
        (moment_s for moment_s in (seen.summary.written_unix_s, spent.end_s) if moment_s is not None), default=None
    )


def _step(assessment: Assessment | None, outline: Outline) -> int | None:
    step = None if assessment is None else assessment.progress.step
    return outline.last_step if step is None else step


def _train_steps(seen: JobSeen, snapshot: JobSnapshot | None) -> int | None:
    configured = "" if snapshot is None or snapshot.record is None else snapshot.record.config.get("train.steps", "")
    if configured.isascii() and configured.isdigit():
        return int(configured)
    return None if seen.summary is None else seen.summary.last.train_steps


def _saved(seen: JobSeen, snapshot: JobSnapshot | None) -> tuple[int | None, float | None]:
    """Return step and time of the newest checkpoint, as the hosts report it, else from the run directory."""
    statuses = () if snapshot is None else tuple(snapshot.statuses.values())
    saves = [(status.saves.saved_step, status.saves.saved_unix_s) for status in statuses if status.saves is not None]
    known = [(step, at_s) for step, at_s in saves if step is not None]
    if known:
        return max(known, key=lambda pair: pair[0])
    last = None if seen.summary is None else seen.summary.last
    return (None, None) if last is None else (last.saved_step, last.saved_unix_s)


def _run_directory(seen: JobSeen, snapshot: JobSnapshot | None) -> str:
    if seen.summary is not None:
        return str(seen.summary.root)
    return "" if snapshot is None or snapshot.record is None else snapshot.record.run_directory


def _contains(row: JobRow, text: str) -> bool:
    texts = (row.name, row.job, row.state, row.headline, row.run_directory, *row.problems)
    return not text or any(text in field.casefold() for field in (*texts, *(reason.text for reason in row.reasons)))


def _when_s(row: JobRow) -> float:
    return row.ended_unix_s or row.began_unix_s or 0.0
