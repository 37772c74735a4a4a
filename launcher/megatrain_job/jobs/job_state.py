"""The activity of a job, in a word and a sentence: a pure function of etcd's content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.incident import Incident, IncidentState
from megatrain.contracts.records.rounds import Halt, JobEnd, Round
from megatrain.formatting import count_text, names_text, seconds_text
from megatrain_job.failures.culprit import first_of
from megatrain_job.jobs.host_view import HostState, HostView, host_views
from megatrain_job.jobs.incident_phrases import current_phase, rank_end_text
from megatrain_job.jobs.snapshot import JobSnapshot


class JobState(StrEnum):
    """The state of a job, in at most three words."""

    TRAINING = "training"
    STARTING = "starting"
    RECOVERING = "recovering"
    STUCK = "stuck"
    """Ranks make no progress, and the driver has not yet decided what to do."""
    WAITING = "waiting"
    """There is no round: hosts are missing."""
    STOPPING = "stopping"
    """The round saves and stops: on request, or so that the next one has other hosts."""
    FINISHED = "finished"
    SAVED = "saved and stopped"
    FAILED = "failed"
    NOT_RUNNING = "not running"
    """No executor is registered."""


OVER = (JobState.FINISHED, JobState.SAVED, JobState.FAILED, JobState.NOT_RUNNING)


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of the newest round's ranks."""

    step: int | None = None
    """The last step that every reporting rank has completed."""
    max_step: int | None = None
    last_step_unix_s: float | None = None
    median_step_s: float | None = None


@dataclass(frozen=True, slots=True)
class JobActivity:
    """The activity of a job. `headline` has more details than `state`; since_unix_s: when `state` began."""

    state: JobState
    headline: str
    since_unix_s: float | None
    progress: JobProgress
    views: tuple[HostView, ...]
    is_live: bool
    """The newest round may run: hosts are registered, and it is not halted."""
    is_waiting: bool
    """Hosts are registered, and no round may run: the last one is over, or there was none."""

    @property
    def members(self) -> tuple[HostView, ...]:
        """The hosts of the newest round."""
        return tuple(view for view in self.views if view.part is not None)


def activity_of(snapshot: JobSnapshot) -> JobActivity:
    """Return the activity of a job."""
    views = host_views(snapshot)
    progress = _progress(views)
    state, headline, since_s = _state(snapshot, views, progress)
    may_run = snapshot.newest_round is not None and snapshot.newest_halt is None
    is_there = bool(snapshot.hosts) and snapshot.end is None
    return JobActivity(
        state, headline, since_s, progress, views, is_live=is_there and may_run, is_waiting=is_there and not may_run
    )


def open_incident(snapshot: JobSnapshot) -> Incident | None:
    """Return the newest incident that is not closed, None if there is none."""
    unclosed = [incident for incident in snapshot.incidents if incident.state is IncidentState.OPEN]
    return unclosed[-1] if unclosed else None


def _progress(views: Sequence[HostView]) -> JobProgress:
    statuses = [view.status for view in views if view.part is not None and view.status is not None]
    least = [status.min_step for status in statuses if status.min_step is not None]
    most = [status.max_step for status in statuses if status.max_step is not None]
    times = [status.last_step_unix_s for status in statuses if status.last_step_unix_s is not None]
    medians = [status.median_step_s for status in statuses if status.median_step_s is not None]
    return JobProgress(
        min(least, default=None), max(most, default=None), min(times, default=None), max(medians, default=None)
    )


_Answer = tuple[JobState, str, float | None]


def _state(snapshot: JobSnapshot, views: Sequence[HostView], progress: JobProgress) -> _Answer:
    if snapshot.end is not None:
        return _of_end(snapshot.end)
    newest, halt = snapshot.newest_round, snapshot.newest_halt
    if not snapshot.hosts:
        return JobState.NOT_RUNNING, "not running: no executor is registered", None
    if newest is None:
        return _before_any_round(snapshot, views)
    if halt is not None:
        return _of_halt(snapshot, newest, halt, views)
    return _of_round(snapshot, newest, views, progress)


def _of_end(end: JobEnd) -> _Answer:
    if end.exit_code == ExitCode.OK:
        return JobState.FINISHED, f"finished: {end.reason}", end.created_unix_s
    if end.exit_code == ExitCode.SAVED_AND_STOPPED:
        return JobState.SAVED, f"saved and stopped; start it again to continue: {end.reason}", end.created_unix_s
    return JobState.FAILED, f"over, with exit code {end.exit_code}: {end.reason}", end.created_unix_s


def _of_halt(snapshot: JobSnapshot, newest: Round, halt: Halt, views: Sequence[HostView]) -> _Answer:
    busy = [view.host for view in views if view.part is not None and not _has_stopped(view, newest.number)]
    if busy and halt.is_saving:
        text = f"saving and stopping on {names_text(busy)}: {halt.reason}"
        return JobState.STOPPING, text, halt.created_unix_s
    if busy:
        waits = f"waits until {names_text(busy)} {'has' if len(busy) == 1 else 'have'} stopped"
    elif (num_fit := _num_usable(views)) < _min_hosts(snapshot):
        waits = f"waits for hosts: {num_fit} of at least {_min_hosts(snapshot)} can be used"
    else:
        waits = "all have stopped, and the driver decides how to continue"
    return JobState.RECOVERING, f"recovering, {waits}: {halt.reason}", halt.created_unix_s


def _has_stopped(view: HostView, number: int) -> bool:
    status = view.status
    if status is None or view.part is None or view.part.session != status.session:
        return True  # gone, or in another session: its workers have exited, or the driver excludes the host
    if status.phase is HostPhase.FAILED:
        return status.round >= number and not status.alive_ranks.strip("0")
    return status.round >= number and status.phase in (HostPhase.STOPPED, HostPhase.PARKED, HostPhase.DONE)


def _of_round(snapshot: JobSnapshot, newest: Round, views: Sequence[HostView], progress: JobProgress) -> _Answer:
    members = [view for view in views if view.part is not None]
    incident = open_incident(snapshot)
    size = f"{count_text(newest.world_size, 'rank')} on {count_text(len(newest.hosts), 'host')}"
    failed = [view for view in members if view.status is not None and view.status.failures]
    if failed:
        return JobState.RECOVERING, f"broken: {_first_failure(failed)}", None
    stalled = [view for view in members if view.status is not None and view.status.stall is not None]
    if stalled:
        began_s = min(view.status.stall.at_unix_s - view.status.stall.silent_s
                      for view in stalled if view.status is not None and view.status.stall is not None)  # fmt: skip
        names = names_text([view.host for view in stalled])
        return JobState.STUCK, f"stuck after step {_step(progress)}: no progress on {names}", began_s
    if all(view.state == HostPhase.DONE for view in members):
        return JobState.TRAINING, f"at its end: all workers are done, step {_step(progress)}", None
    starting = [view.host for view in members if view.state in (HostPhase.STARTING, HostPhase.PARKED, HostState.SILENT)]
    if starting:
        where = "all hosts" if len(starting) == len(members) else names_text(starting)
        if incident is not None:
            phase = current_phase(incident)
            doing = f" ({phase})" if phase else ""
            text = f"recovering{doing}, workers start on {where}: {incident.reason}"
            return JobState.RECOVERING, text, incident.moments.began
        return JobState.STARTING, f"starting: {size}, workers start on {where}", newest.created_unix_s
    pace = "" if progress.median_step_s is None else f", {seconds_text(progress.median_step_s)} a step"
    text = f"training: step {_step(progress)}{pace}, {size}"
    return JobState.TRAINING, text, newest.created_unix_s


def _first_failure(views: Sequence[HostView]) -> str:
    hosts = {failure: view.host for view in views if view.status is not None for failure in view.status.failures}
    first = first_of(tuple(hosts))
    return "" if first is None else f"{rank_end_text(first)} (on {hosts[first]})"


def _before_any_round(snapshot: JobSnapshot, views: Sequence[HostView]) -> _Answer:
    num_usable, least = _num_usable(views), _min_hosts(snapshot)
    began_s = None if snapshot.record is None else snapshot.record.created_unix_s
    if num_usable >= least:
        text = f"about to start: {count_text(num_usable, 'host')} can be used, and the job needs {least}"
        return JobState.STARTING, text, began_s
    there = names_text([view.host for view in views if view.record is not None])
    return JobState.WAITING, f"waiting for hosts: {num_usable} of at least {least} can be used ({there})", began_s


def _num_usable(views: Sequence[HostView]) -> int:
    return sum(
        view.record is not None and view.record.is_fit and view.record.num_workers > 0 and view.cordon is None
        for view in views
    )


def _min_hosts(snapshot: JobSnapshot) -> int:
    return 1 if snapshot.record is None else snapshot.record.min_hosts


def _step(progress: JobProgress) -> str:
    return "0" if progress.step is None else f"{progress.step:,}"
