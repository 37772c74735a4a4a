"""Makes the document of /overview.

The overview shows whether the job is healthy; if not, what is wrong, where and since when; what was done about it; and
what comes next. The functions are pure and cheap: they read hosts and the newest steps, never ranks or events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.incident import Incident, IncidentState
from megatrain_dashboard.api.overview.document import (
    CheckpointAge,
    DiagnosisState,
    HostCounts,
    NextAction,
    OverviewDocument,
    ReasonDocument,
)
from megatrain_dashboard.api.overview.next_action import NOTHING, next_action
from megatrain_dashboard.sources.facts import CheckpointsSeen, JobFacts, completed_step, newest_saved
from megatrain_dashboard.sources.series_builder import SeriesSnapshot
from megatrain_diagnostics.analysis.effective_time import effective_time_ratio
from megatrain_diagnostics.store.daemon_state import DaemonState
from megatrain_job.jobs.assessment import Assessment, Unreachable, assess
from megatrain_job.jobs.health import Health, HealthLevel, Reason
from megatrain_job.jobs.host_view import HostState, HostView
from megatrain_job.jobs.job_state import OVER
from megatrain_job.jobs.snapshot import JobSnapshot

_HOUR_S = 3600.0
_NEWEST_STEPS = 20
_MAX_SILENT = 64
_MAX_REASONS = 200
_UNKNOWN = "unknown"
_BUSY = (HostPhase.STARTING, HostPhase.RUNNING, HostPhase.STOPPING)


@dataclass(frozen=True, slots=True)
class OverviewInputs:
    """The data of one moment. `num_hosts`: the hosts of the shown round, where etcd has no state of the job."""

    now_s: float
    facts: JobFacts
    snapshot: JobSnapshot | None = None
    etcd_problem: str = ""
    state: DaemonState | None = None
    is_recorded: bool = False
    num_hosts: int = 0


@dataclass(frozen=True, slots=True)
class _OverviewState:
    """The state of the job, from etcd or from its run directory."""

    state: str
    headline: str
    since_unix_s: float | None
    reasons: tuple[Reason, ...] = ()

    @property
    def level(self) -> HealthLevel:
        return Health(self.reasons).level


def overview_document(given: OverviewInputs) -> OverviewDocument:
    """Return the overview."""
    snapshot, facts, series = given.snapshot, given.facts, given.facts.series
    unreachable = Unreachable(given.etcd_problem) if given.etcd_problem else None
    assessment = None if snapshot is None else assess(snapshot, given.now_s, unreachable)
    job_state = _overview_state(given, assessment)
    step = completed_step(assessment, facts)
    step_s = _newest_median(series, "step_s")
    if step_s is None and assessment is not None:
        step_s = assessment.progress.median_step_s
    train_steps = None if facts.config is None else facts.config.train.steps
    is_over = given.is_recorded or job_state.state in OVER
    own = _incidents(given)
    opened = [incident for incident in own if incident.state is IncidentState.OPEN] if not given.is_recorded else []
    ratio, ratio_last_hour = _ratios(given, own)
    newest, saved = None if snapshot is None else snapshot.newest_round, newest_saved(facts.checkpoints)
    reasons = [ReasonDocument.of(reason, level=reason.level.value) for reason in job_state.reasons[:_MAX_REASONS]]
    return OverviewDocument.of(
        job_state,
        at_unix_s=given.now_s,
        level=job_state.level.value,
        reasons=tuple(reasons),
        round=newest.number if newest is not None else _shown_round(facts),
        step=step,
        last_step_unix_s=_last_step_unix_s(assessment, series),
        train_steps=train_steps,
        tokens=tokens_so_far(series, facts.checkpoints, step),
        loss=series.newest("loss"),
        grad_norm=series.newest("grad"),
        step_s=step_s,
        tokens_per_s=_newest_median(series, "tokens_per_s"),
        mfu=_newest_median(series, "mfu"),
        remaining_s=None if is_over else _remaining_s(step, train_steps, step_s),
        effective_time_ratio=ratio,
        effective_time_ratio_last_hour=ratio_last_hour,
        checkpoint=None if saved is None else CheckpointAge.of(saved),
        hosts=_host_counts(assessment, given.num_hosts),
        num_open_incidents=len(opened),
        num_incidents=len(facts.incidents),
        open_incident=opened[-1].incident_id if opened else "",
        next_action=_next(given, assessment, job_state, step, step_s),
        diagnosis=_diagnosis(given),
    )


def tokens_so_far(series: SeriesSnapshot, checkpoints: CheckpointsSeen, step: int | None) -> int | None:
    """Return the tokens trained on in `step` steps; steps that were repeated count once.

    Where the events of some steps are missing (expired, or never streamed), the newest checkpoint gives the tokens
    before it, and each step after it counts as the average of the known steps.
    """
    saved = newest_saved(checkpoints)
    known = np.isfinite(series.column("tokens"))
    num_known = int((series.column("last") - series.column("first") + 1)[known].sum())
    if not num_known or step is None:
        return None if saved is None else saved.consumed_tokens
    total = float(np.nansum(series.column("tokens")))
    if num_known == step:
        return round(total)
    begin, tokens = (0, 0) if saved is None or saved.consumed_tokens is None else (saved.step, saved.consumed_tokens)
    return tokens + round(total / num_known * max(0, step - begin))


def _newest_median(series: SeriesSnapshot, name: str) -> float | None:
    newest = series.column(name)[-_NEWEST_STEPS:]
    known = newest[np.isfinite(newest)]
    return float(np.median(known)) if len(known) else None


def _overview_state(given: OverviewInputs, assessment: Assessment | None) -> _OverviewState:
    if given.is_recorded:
        found = given.facts.run_state
        assert found is not None, "a recorded job has one"
        return _OverviewState(found.state, found.headline, None, found.health.reasons)
    if assessment is None:
        unknown = Unreachable(given.etcd_problem or "etcd has not answered yet")
        return _OverviewState(_UNKNOWN, unknown.why, None, (unknown.reason,))
    reasons = assessment.health.reasons
    if given.etcd_problem and not assessment.is_over:
        return _OverviewState(_UNKNOWN, given.etcd_problem, None, reasons)
    return _OverviewState(str(assessment.state), assessment.headline, assessment.since_unix_s, reasons)


def _incidents(given: OverviewInputs) -> Sequence[Incident]:
    return given.facts.incidents if given.snapshot is None else given.snapshot.incidents


def _ratios(given: OverviewInputs, own: Sequence[Incident]) -> tuple[float | None, float | None]:
    """Return the effective time ratio of the whole job and of the last hour."""
    begin_s, end_s = _bounds(given)
    if begin_s is None or end_s is None:
        return None, None
    restarts = given.facts.series.restarts
    hour_s = max(begin_s, end_s - _HOUR_S)
    return effective_time_ratio(own, restarts, begin_s, end_s), effective_time_ratio(own, restarts, hour_s, end_s)


def _bounds(given: OverviewInputs) -> tuple[float | None, float | None]:
    """Return when the job began, and when it ended or now."""
    snapshot, series = given.snapshot, given.facts.series
    began = [round_.began_unix_s for round_ in given.facts.rounds]
    begin_s = min(began, default=None)
    if snapshot is not None and snapshot.record is not None:
        begin_s = snapshot.record.created_unix_s
    if snapshot is not None:
        return begin_s, given.now_s if snapshot.end is None else snapshot.end.created_unix_s
    ends = [incident.moments.first_step or incident.moments.detected for incident in given.facts.incidents]
    last_s = series.newest("at")
    return begin_s, max([*ends, *([] if last_s is None else [last_s])], default=None)


def _shown_round(facts: JobFacts) -> int | None:
    confirmed = [round_.number for round_ in facts.rounds if round_.is_confirmed]
    return confirmed[-1] if confirmed else None


def _last_step_unix_s(assessment: Assessment | None, series: SeriesSnapshot) -> float | None:
    """Return when the newest step was completed: hosts report it every few seconds, events arrive within one second."""
    of_hosts = None if assessment is None else assessment.progress.last_step_unix_s
    return max((moment_s for moment_s in (of_hosts, series.newest("at")) if moment_s is not None), default=None)


def _remaining_s(step: int | None, train_steps: int | None, step_s: float | None) -> float | None:
    if step is None or train_steps is None or step_s is None:
        return None
    return max(0, train_steps - step) * step_s


def _host_counts(assessment: Assessment | None, num_hosts: int) -> HostCounts:
    if assessment is None:
        return HostCounts(total=num_hosts, training=0, spare=0, cordoned=0, unfit=0, lost=0)
    views: Sequence[HostView] = assessment.hosts
    states = Counter(str(view.state) for view in views)
    return HostCounts(
        total=len(views),
        training=sum(view.part is not None and view.state in _BUSY for view in views),
        spare=states[HostState.SPARE],
        cordoned=sum(view.cordon is not None for view in views),
        unfit=states[HostState.UNFIT],
        lost=states[HostState.LOST] + states[HostState.RETURNED],
    )


def _next(
    given: OverviewInputs,
    assessment: Assessment | None,
    job_state: _OverviewState,
    step: int | None,
    step_s: float | None,
) -> NextAction:
    if given.is_recorded or given.snapshot is None or assessment is None:
        return NextAction(what=NOTHING, why=job_state.headline, verdict_id="")
    if given.etcd_problem:
        return NextAction(what="not known", why=given.etcd_problem, verdict_id="")
    return next_action(given.snapshot, assessment, given.facts.cases, given.facts.config, step=step, step_s=step_s)


def _diagnosis(given: OverviewInputs) -> DiagnosisState:
    state = given.state
    silent = () if state is None else state.silent_ranks
    problem = () if state is None or not state.problem else (state.problem,)
    return DiagnosisState(
        is_daemon_alive=given.facts.is_daemon_alive,
        silent_ranks=silent[:_MAX_SILENT],
        num_silent_ranks=len(silent),
        rows_dropped=0 if state is None else state.dropped_rows,
        rows_refused=0 if state is None else sum(state.refused_rows.values()),
        problems=(*problem, *given.facts.problems),
    )
