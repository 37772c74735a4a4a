"""The assessment of a job: its activity, its health, its hosts. Pure functions: no I/O and no clock.

An assessment is computed from one revision of etcd's content, and the time. So its parts are consistent, and all
commands and pages show the same at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatrain_job.jobs.health import Health, Reason, ReasonCode, health_of
from megatrain_job.jobs.host_view import HostView
from megatrain_job.jobs.job_state import OVER, JobActivity, JobProgress, JobState, activity_of
from megatrain_job.jobs.reasons.coordination import reasons_of_coordination
from megatrain_job.jobs.reasons.diagnosis import reasons_of_diagnosis
from megatrain_job.jobs.reasons.saves import reasons_of_saves
from megatrain_job.jobs.reasons.training import reasons_of_end, reasons_of_hosts, reasons_of_training
from megatrain_job.jobs.snapshot import JobSnapshot


@dataclass(frozen=True, slots=True)
class Unreachable:
    """etcd does not answer, so the known state is old. since_unix_s: time of the last answer; None if there is none."""

    why: str
    since_unix_s: float | None = None

    @property
    def reason(self) -> Reason:
        return Reason(ReasonCode.UNREACHABLE, self.why, self.since_unix_s)


@dataclass(frozen=True, slots=True)
class Assessment:
    """The answer of `megatrain status`. `headline` has more details than `state`; since_unix_s: when `state` began."""

    state: JobState
    headline: str
    since_unix_s: float | None
    progress: JobProgress
    health: Health
    hosts: tuple[HostView, ...]

    @property
    def is_over(self) -> bool:
        return self.state in OVER


def assess(snapshot: JobSnapshot, now_s: float, unreachable: Unreachable | None = None) -> Assessment:
    """Return the state of a job.

    unreachable: why no state newer than this snapshot is known, if etcd is unavailable.
    """
    activity = activity_of(snapshot)
    health = health_of(_reasons(snapshot, activity, now_s, unreachable))
    return Assessment(
        activity.state, activity.headline, activity.since_unix_s, activity.progress, health, activity.views
    )  # fmt: skip


def _reasons(
    snapshot: JobSnapshot, activity: JobActivity, now_s: float, unreachable: Unreachable | None
) -> Iterator[Reason]:
    if snapshot.end is not None:
        yield from reasons_of_end(snapshot, snapshot.end)
        return
    if unreachable is not None:
        yield unreachable.reason
    yield from reasons_of_training(snapshot, activity, now_s)
    yield from reasons_of_hosts(activity)
    yield from reasons_of_saves(snapshot, activity, now_s)
    yield from reasons_of_coordination(snapshot, now_s)
    yield from reasons_of_diagnosis(snapshot, activity, now_s)
