"""Reasons about training: whether the job trains, or starts or recovers in time, and how many restarts are left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatrain.contracts.black_box.values import Phase
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.incident import OVER_NOTE, Incident, IncidentKind, IncidentState
from megatrain.contracts.records.rounds import JobEnd
from megatrain.formatting import age_text, ranks_text, seconds_text
from megatrain_job.jobs.health import Reason, ReasonCode
from megatrain_job.jobs.host_view import HostState
from megatrain_job.jobs.incident_phrases import current_phase
from megatrain_job.jobs.job_state import JobActivity, JobState, open_incident
from megatrain_job.jobs.restart_budget import configured_budget
from megatrain_job.jobs.snapshot import JobSnapshot

_CHECKPOINT = Phase.CHECKPOINT.name.lower()
"""Phase of a rank in a snapshot. The copy takes seconds; a longer snapshot waits for storage."""
_LATE_S = 30.0
_LATE_STEPS = 3.0
"""A step is late after the longer of _LATE_S and this many median steps. A status may be some seconds old."""
_PATIENCE_KEY = "recovery.join_timeout_s"
_PATIENCE_S = 600.0
"""Time for hosts to register or to stop their workers, if the job's record has no limit. Ranks have no limit here,
because executors watch them and report stalls."""


def reasons_of_end(snapshot: JobSnapshot, end: JobEnd) -> Iterator[Reason]:
    """Yield the reason why a job failed; nothing if it ended well."""
    if end.exit_code in (ExitCode.OK, ExitCode.SAVED_AND_STOPPED):
        return
    last = snapshot.incidents[-1] if snapshot.incidents else None
    code = ReasonCode.FAILED
    if last is not None and last.state is IncidentState.STOPPED:
        before = snapshot.incidents[:-1]
        budget = configured_budget(_config(snapshot), before, last.last_step, last.moments.detected)
        if budget is not None and budget.is_used_up:
            code = ReasonCode.RESTART_LIMIT
    hosts, ranks = ((), ()) if last is None else (last.culprit_hosts, last.culprit_ranks)
    yield Reason(
        code, f"the job ended with exit code {end.exit_code}: {end.reason}", end.created_unix_s, hosts, ranks
    )  # fmt: skip


def reasons_of_training(snapshot: JobSnapshot, activity: JobActivity, now_s: float) -> Iterator[Reason]:
    """Yield the reasons why a job does not train, and a reason if half of its allowed restarts are used."""
    incident = open_incident(snapshot)
    if activity.state is JobState.NOT_RUNNING:
        yield Reason(ReasonCode.NOT_RUNNING, "no executor is registered, and no end of the job is recorded")
    elif activity.is_waiting and (late := _late(snapshot, activity, incident, now_s)) is not None:
        yield late
    elif activity.state is JobState.WAITING:
        yield Reason(ReasonCode.WAITING_FOR_HOSTS, activity.headline, activity.since_unix_s)
    if incident is not None:
        yield _of_incident(incident)
    elif activity.state is JobState.RECOVERING and activity.is_waiting:
        yield Reason(ReasonCode.RECOVERING, activity.headline, activity.since_unix_s)
    yield from _late_step(activity, now_s)
    yield from _held(snapshot, now_s)
    yield from _budget(snapshot, activity, now_s)


def _late(snapshot: JobSnapshot, activity: JobActivity, incident: Incident | None, now_s: float) -> Reason | None:
    """Return the reason if hosts have not registered, or not stopped their workers, in time."""
    patience_s = number_of(_config(snapshot), _PATIENCE_KEY) or _PATIENCE_S
    began_s = activity.since_unix_s
    if began_s is None or now_s - began_s <= patience_s:
        return None
    hosts = () if incident is None else incident.culprit_hosts
    text = f"{activity.headline}; for longer than {_PATIENCE_KEY}={patience_s:g}"
    return Reason(ReasonCode.LATE, text, began_s, hosts)


def _of_incident(incident: Incident) -> Reason:
    phase = current_phase(incident)
    doing = f"{incident.action}, now: {phase}" if phase else incident.action
    text = f"incident {incident.incident_id} is open ({doing}): {incident.reason}"
    code = ReasonCode.REQUESTED if incident.kind is IncidentKind.REQUEST else ReasonCode.RECOVERING
    return Reason(
        code, text, incident.moments.began, incident.culprit_hosts, incident.culprit_ranks
    )  # fmt: skip


def _late_step(activity: JobActivity, now_s: float) -> Iterator[Reason]:
    progress = activity.progress
    if activity.state is not JobState.TRAINING or progress.last_step_unix_s is None:
        return
    is_training = all(view.state == HostPhase.RUNNING for view in activity.members)
    limit_s = max(_LATE_S, _LATE_STEPS * (progress.median_step_s or 0.0))
    if is_training and now_s - progress.last_step_unix_s > limit_s:
        text = f"no step was completed for {age_text(progress.last_step_unix_s, now_s)}"
        if progress.median_step_s is not None:
            text += f", and a step takes {seconds_text(progress.median_step_s)}"
        if all(view.status is not None and view.status.step_phase == _CHECKPOINT for view in activity.members):
            text = f"training waits in a snapshot until storage has an earlier one: {text}"
            yield Reason(ReasonCode.SAVE_LATE, text, progress.last_step_unix_s)
        else:
            yield Reason(ReasonCode.STEP_LATE, text, progress.last_step_unix_s)


def _held(snapshot: JobSnapshot, now_s: float) -> Iterator[Reason]:
    held = snapshot.incidents[-1] if snapshot.incidents else None
    newest = snapshot.newest_round
    if held is None or newest is None or held.state is not IncidentState.HELD or held.round != newest.number:
        return
    if OVER_NOTE in held.notes:
        return
    text = f"hosts were held {age_text(held.moments.detected, now_s)} ago, and no host was evicted: {held.reason}"
    yield Reason(ReasonCode.HELD, text, held.moments.detected, held.culprit_hosts, held.culprit_ranks)


def _budget(snapshot: JobSnapshot, activity: JobActivity, now_s: float) -> Iterator[Reason]:
    budget = configured_budget(_config(snapshot), snapshot.incidents, activity.progress.max_step, now_s)
    if budget is None or not budget.is_half_used:
        return
    began_s = (budget.recent or budget.without_new_step)[0].moments.detected
    if budget.is_used_up:
        yield Reason(ReasonCode.RESTART_LIMIT, f"the next failure ends the job: {budget.text()}", began_s)
    else:
        yield Reason(ReasonCode.RESTART_BUDGET, budget.text(), began_s)


def reasons_of_hosts(activity: JobActivity) -> Iterator[Reason]:
    """Yield the reasons that concern single hosts."""
    for view in activity.views:
        ranks = tuple(view.ranks)
        status = view.status
        if activity.is_live and view.is_lost:
            what = "is lost: its lease is gone, or the driver found it dead"
            if view.state == HostState.RETURNED:
                what = "came back as another executor: only the next round can include it"
            text = f"{view.host} ({ranks_text(ranks)}) {what}"
            yield Reason(ReasonCode.HOST_LOST, text, None, (view.host,), ranks)
        elif activity.is_live and view.part is not None and status is not None and status.failures:
            since_s = min(failure.at_unix_s for failure in status.failures)
            yield Reason(ReasonCode.BROKEN, f"{view.host}: {view.remark}", since_s, (view.host,), ranks)
        elif activity.is_live and view.part is not None and status is not None and status.stall is not None:
            since_s, stuck = status.stall.at_unix_s - status.stall.silent_s, status.stall.ranks or ranks
            yield Reason(ReasonCode.STUCK, f"{view.host}: {view.remark}", since_s, (view.host,), stuck)
        elif view.is_unfit:
            yield Reason(ReasonCode.HOST_UNFIT, f"{view.host} is unfit: {view.remark}", None, (view.host,))
        elif activity.is_live and view.problem:
            yield Reason(ReasonCode.HOST_PROBLEM, f"{view.host}: {view.problem}", None, (view.host,))


def number_of(config: Mapping[str, str], key: str) -> float | None:
    """Return a number in a job's record; None if it is missing or not above 0."""
    try:
        found = float(config.get(key, ""))
    except ValueError:
        return None
    return found if 0 < found < 1e12 else None


def _config(snapshot: JobSnapshot) -> Mapping[str, str]:
    return {} if snapshot.record is None else snapshot.record.config
