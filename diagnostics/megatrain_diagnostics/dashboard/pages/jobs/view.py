"""/jobs: each job in a line. Pure: how a job is, `assess` says where etcd tells of it, and `run_standing` elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.contracts.texts import natural_order
from megatrain.jobs.assessment import Assessment, assess
from megatrain.jobs.health import Health, HealthLevel, Reason, ReasonCode
from megatrain.jobs.run_standing import RunKind
from megatrain.jobs.snapshot import JobSnapshot
from megatrain_diagnostics.dashboard.pages.jobs.document import JobRow, RowReason, Trouble, TroubleCounts
from megatrain_diagnostics.dashboard.sources.runs.catalog import JobSeen
from megatrain_diagnostics.dashboard.sources.runs.course import Outline
from megatrain_diagnostics.dashboard.sources.runs.time_spent import TimeSpent, incidents_of, time_of

FRESH_TROUBLE_S = 86_400.0
"""So long a job that broke, or is out of reach, is somebody's to look at; after that it is one that ended."""
_MOST_REASONS = 3
_ORDER: dict[Trouble, int] = {"red": 0, "amber": 1, "green": 2, "ended": 3}
_TROUBLE_OF: dict[HealthLevel, Trouble] = {
    HealthLevel.RED: "red", HealthLevel.AMBER: "amber", HealthLevel.GREEN: "green",
}  # fmt: skip
_NOTHING = Outline()


@dataclass(frozen=True, slots=True)
class Choice:
    """Which jobs are asked for. `trouble`: empty for all; `text`: what must occur in what is said of a job."""

    trouble: str = ""
    text: str = ""
    order: str = "trouble"
    first: int = 0
    count: int = 100


@dataclass(frozen=True, slots=True)
class _Standing:
    """How a job is, by whoever can tell."""

    state: str
    headline: str
    health: Health
    is_over: bool


def chosen_rows(rows: Sequence[JobRow], choice: Choice) -> list[JobRow]:
    """Return the rows that a choice leaves, in its order, all of them."""
    found = [row for row in rows if choice.trouble in ("", row.trouble) and _says(row, choice.text.casefold())]
    if choice.order == "name":
        return sorted(found, key=lambda row: natural_order(row.name))
    if choice.order == "newest":
        return sorted(found, key=lambda row: -(row.began_unix_s or 0.0))
    return sorted(found, key=lambda row: (_ORDER[row.trouble], -_when_s(row), natural_order(row.name)))


def counts_of(rows: Sequence[JobRow]) -> TroubleCounts:
    counts = Counter(row.trouble for row in rows)
    return TroubleCounts(red=counts["red"], amber=counts["amber"], green=counts["green"], ended=counts["ended"])


def job_row(seen: JobSeen, now_s: float) -> JobRow:
    """Return a job as a line."""
    glance = seen.glance
    snapshot, spent = seen.snapshot, time_of(seen, now_s)
    assessment = None if snapshot is None or seen.look is None else assess(snapshot, now_s, seen.look.unreachable)
    standing = _standing(seen, assessment)
    outline = _NOTHING if glance is None else glance.outline
    step, train_steps = _step(assessment, outline), _train_steps(seen, snapshot)
    step_s = outline.step_s
    if step_s is None and assessment is not None:
        step_s = assessment.progress.median_step_s
    saved_step, saved_s = _saved(seen, snapshot)
    newest = None if snapshot is None else snapshot.newest_round
    reasons = standing.health.reasons
    is_going = not standing.is_over and step is not None and train_steps is not None and step_s is not None
    return JobRow(
        name=seen.name,
        job=snapshot.job if snapshot is not None else glance.job if glance is not None else seen.name,
        trouble=_trouble(seen, standing, spent, now_s),
        level=standing.health.level.value,
        state=standing.state,
        headline=standing.headline,
        reasons=tuple(
            RowReason(code=one.code.value, level=one.level.value, text=one.text) for one in reasons[:_MOST_REASONS]
        ),
        num_reasons=len(reasons),
        problems=() if glance is None else glance.problems,
        is_live=snapshot is not None,
        is_over=standing.is_over,
        step=step,
        train_steps=train_steps,
        remaining_s=max(0, (train_steps or 0) - (step or 0)) * (step_s or 0.0) if is_going else None,
        loss=outline.loss,
        loss_line=outline.loss_line,
        step_s=step_s,
        step_s_line=outline.step_s_line,
        tokens_per_s=outline.tokens_per_s,
        mfu=outline.mfu,
        effective_time_ratio=spent.ratio,
        training_s=spent.training_s,
        saved_step=saved_step,
        saved_unix_s=saved_s,
        num_hosts=None if newest is None else len(newest.hosts),
        num_ranks=outline.num_ranks if newest is None else newest.world_size,
        num_incidents=max(len(incidents_of(seen)), 0 if glance is None else glance.num_incidents),
        began_unix_s=spent.begin_s,
        ended_unix_s=spent.end_s,
        run_directory=_run_directory(seen, snapshot),
        why_not_opened=why_not_opened(seen),
        url="" if snapshot is None else snapshot.dashboard_url,
    )


def why_not_opened(seen: JobSeen) -> str:
    """Return why a job has no page here, empty where it has one."""
    if seen.glance is None:
        return "its run directory is not on this machine"
    if not seen.glance.facts.is_run:
        return seen.glance.problems[0] if seen.glance.problems else "nothing of a run is there"
    return ""


def _standing(seen: JobSeen, assessment: Assessment | None) -> _Standing:
    if assessment is not None:
        return _Standing(str(assessment.state), assessment.headline, assessment.health, assessment.is_over)
    if seen.glance is None:
        unreachable = None if seen.look is None else seen.look.unreachable
        why = "etcd tells nothing of it" if unreachable is None else unreachable.why
        health = Health() if unreachable is None else Health((unreachable.reason,))
        return _Standing(str(RunKind.UNREACHABLE), why, health, is_over=False)
    glance = seen.glance
    if not glance.facts.is_run and glance.problems:
        reason = Reason(ReasonCode.RECORD_UNREADABLE, glance.problems[0])
        return _Standing("damaged", glance.problems[0], Health((reason,)), is_over=True)
    found = glance.standing
    is_over = found.kind not in (RunKind.RUNNING, RunKind.UNREACHABLE)
    return _Standing(found.state, found.headline, found.health, is_over)


def _trouble(seen: JobSeen, standing: _Standing, spent: TimeSpent, now_s: float) -> Trouble:
    level = standing.health.level
    has_launch = seen.snapshot is not None or (seen.glance is not None and seen.glance.facts.is_held)
    if has_launch and not standing.is_over:
        return _TROUBLE_OF[level]
    last_s = _last_sign_s(seen, spent)
    if level is HealthLevel.GREEN or last_s is None or now_s - last_s >= FRESH_TROUBLE_S:
        return "ended"
    return _TROUBLE_OF[level]


def _last_sign_s(seen: JobSeen, spent: TimeSpent) -> float | None:
    """Return when a job ended; where nobody has written that, when it wrote anything last."""
    if seen.glance is None or seen.glance.facts.exit_code is not None:
        return spent.end_s
    return max((one for one in (seen.glance.written_unix_s, spent.end_s) if one is not None), default=None)


def _step(assessment: Assessment | None, outline: Outline) -> int | None:
    told = None if assessment is None else assessment.progress.step
    return outline.last_step if told is None else told


def _train_steps(seen: JobSeen, snapshot: JobSnapshot | None) -> int | None:
    told = "" if snapshot is None or snapshot.record is None else snapshot.record.config.get("train.steps", "")
    if told.isascii() and told.isdigit():
        return int(told)
    return None if seen.glance is None else seen.glance.last.train_steps


def _saved(seen: JobSeen, snapshot: JobSnapshot | None) -> tuple[int | None, float | None]:
    """Return the newest checkpoint, as the hosts tell of it, else as the directory does."""
    statuses = () if snapshot is None else tuple(snapshot.statuses.values())
    told = [(one.saves.saved_step, one.saves.saved_unix_s) for one in statuses if one.saves is not None]
    known = [(step, at_s) for step, at_s in told if step is not None]
    if known:
        return max(known, key=lambda pair: pair[0])
    last = None if seen.glance is None else seen.glance.last
    return (None, None) if last is None else (last.saved_step, last.saved_unix_s)


def _run_directory(seen: JobSeen, snapshot: JobSnapshot | None) -> str:
    if seen.glance is not None:
        return str(seen.glance.root)
    return "" if snapshot is None or snapshot.record is None else snapshot.record.run_directory


def _says(row: JobRow, text: str) -> bool:
    said = (row.name, row.job, row.state, row.headline, row.run_directory, *row.problems)
    return not text or any(text in one.casefold() for one in (*said, *(one.text for one in row.reasons)))


def _when_s(row: JobRow) -> float:
    return row.ended_unix_s or row.began_unix_s or 0.0
