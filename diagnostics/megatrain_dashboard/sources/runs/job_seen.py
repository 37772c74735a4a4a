"""A job as it was seen last: its run directory, its state in etcd, and how much of its time went into steps that count.

Pure functions: no I/O and no clock. The overview computes that time by the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.contracts.records.incident import Incident
from megatrain_dashboard.sources.runs.etcd_polls import EtcdAccess
from megatrain_dashboard.sources.runs.run_summary import RunSummary
from megatrain_diagnostics.analysis.effective_time import effective_time_ratio
from megatrain_job.jobs.etcd_job import EtcdPoll
from megatrain_job.jobs.snapshot import JobSnapshot


@dataclass(frozen=True, slots=True)
class JobSeen:
    """A job as it was seen last. `name` is its name in requests."""

    name: str
    summary: RunSummary | None = None
    """None: its run directory is not on this machine."""
    poll: EtcdPoll | None = None
    """None: there is no sign that it runs."""
    access: EtcdAccess | None = None

    @property
    def snapshot(self) -> JobSnapshot | None:
        """Its state in etcd, or the last one before etcd became unreachable; None where etcd has no such job."""
        snapshot = None if self.poll is None else self.poll.snapshot
        return snapshot if snapshot is not None and snapshot.exists else None


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Units: unix seconds, but `training_s` is a duration in s. None: not known, or, for the end, not reached yet."""

    begin_s: float | None
    end_s: float | None
    ratio: float | None
    """The time in steps that count, divided by the time from begin to end or now."""
    training_s: float | None


def time_of(seen: JobSeen, now_s: float) -> TimeSpent:
    """Return the time of a job; of its newest launch where etcd has the job's state."""
    begin_s, end_s = _bounds(seen)
    until_s = now_s if end_s is None else end_s
    restarts = () if seen.summary is None else seen.summary.outline.restarts
    ratio = None if begin_s is None else effective_time_ratio(incidents_of(seen), restarts, begin_s, until_s)
    training_s = None if ratio is None or begin_s is None else ratio * (until_s - begin_s)
    return TimeSpent(begin_s, end_s, ratio, training_s)


def incidents_of(seen: JobSeen) -> Sequence[Incident]:
    """Return the incidents in etcd, else the newest ones of the run directory."""
    if seen.snapshot is not None:
        return seen.snapshot.incidents
    return () if seen.summary is None else seen.summary.incidents


def _bounds(seen: JobSeen) -> tuple[float | None, float | None]:
    outline_begin_s = None if seen.summary is None else seen.summary.outline.begin_s
    snapshot = seen.snapshot
    if snapshot is None:
        return outline_begin_s, None if seen.summary is None else seen.summary.ended_unix_s
    begin_s = outline_begin_s if snapshot.record is None else snapshot.record.created_unix_s
    return begin_s, None if snapshot.end is None else snapshot.end.created_unix_s
