"""Reasons about checkpoints: whether they reach storage, the age of the newest, and free disk space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatrain.contracts.records.host_records import DiskSpace, HostSaves
from megatrain.formatting import age_text, bytes_text, count_text, seconds_text
from megatrain_job.jobs.health import Reason, ReasonCode
from megatrain_job.jobs.job_state import JobActivity, JobState
from megatrain_job.jobs.reasons.training import number_of
from megatrain_job.jobs.snapshot import JobSnapshot

FAILS = 2
"""After this many consecutive snapshots that did not reach storage, the health is red."""
LATE_PERIODS, LATE_S = 2.0, 60.0
OLD_PERIODS, OLD_S = 4.0, 600.0
"""The newest checkpoint is late, or too old, if it is older than this many periods plus this many seconds."""
SOON_S = 24 * 3600.0
"""A disk that will be full within this time is reported."""
_MIN_FREE_PART = 0.01
_MIN_FREE_SAVES = 2


def reasons_of_saves(snapshot: JobSnapshot, activity: JobActivity, now_s: float) -> Iterator[Reason]:
    """Yield the reasons that concern checkpoints and the space for them."""
    saves_by_host = {
        view.host: view.status.saves
        for view in activity.members
        if view.status is not None and view.status.saves is not None
    }
    yield from _failures(saves_by_host)
    if snapshot.report is not None and snapshot.report.checkpoint_damage:
        hint = "`megatrain job checkpoint` saves now"
        yield Reason(ReasonCode.CHECKPOINT_DAMAGED, f"{snapshot.report.checkpoint_damage}; {hint}")
    yield from _age(snapshot, activity, saves_by_host, now_s)
    yield from _disks(activity)


def _period_s(config: Mapping[str, str], activity: JobActivity) -> float | None:
    """Return the period of checkpoints in seconds; None if none are due, or the period is not known yet.

    If checkpoints are due by time, rank 0 sets the period: longer than configured if checkpoints cost much time.
    """
    interval = number_of(config, "checkpoint.interval")
    if interval is not None:
        median_step_s = activity.progress.median_step_s
        return None if median_step_s is None else interval * median_step_s
    intervals_s = [view.status.save_interval_s for view in activity.members if view.status is not None]
    in_force = max((interval_s for interval_s in intervals_s if interval_s is not None), default=None)
    return number_of(config, "checkpoint.interval_s") if in_force is None else in_force


def _failures(saves_by_host: Mapping[str, HostSaves]) -> Iterator[Reason]:
    if not saves_by_host:
        return
    host = max(saves_by_host, key=lambda name: saves_by_host[name].num_failed)
    saves = saves_by_host[host]
    hosts = tuple(name for name, saves in saves_by_host.items() if saves.num_failed)
    if saves.num_failed >= FAILS:
        text = f"the last {saves.num_failed} checkpoints did not reach storage ({host}): {saves.error}"
        yield Reason(ReasonCode.SAVES_FAIL, text, saves.failing_unix_s, hosts)
    elif saves.num_failed:
        text = f"the last checkpoint did not reach storage; the next one will be tried ({host}): {saves.error}"
        yield Reason(ReasonCode.SAVE_FAILED, text, saves.failing_unix_s, hosts)


def _age(
    snapshot: JobSnapshot, activity: JobActivity, saves_by_host: Mapping[str, HostSaves], now_s: float
) -> Iterator[Reason]:
    """Yield the reason if a checkpoint is overdue.

    The time counts from the round's first step at the earliest: nothing could be saved before.
    """
    config = {} if snapshot.record is None else snapshot.record.config
    period_s = _period_s(config, activity)
    firsts = [view.status.milestones.first_step_unix_s for view in activity.members if view.status is not None]
    began_s = max((moment_s for moment_s in firsts if moment_s is not None), default=None)
    if period_s is None or began_s is None or activity.state is not JobState.TRAINING:
        return
    saved = max(
        ((saves.saved_unix_s, saves.saved_step) for saves in saves_by_host.values() if saves.saved_unix_s is not None),
        default=None,
    )
    since_s = began_s if saved is None else max(began_s, saved[0])
    age_s = now_s - since_s
    if age_s <= LATE_PERIODS * period_s + LATE_S:
        return
    what = "no checkpoint has reached storage since training began"
    if saved is not None and saved[0] >= began_s:
        what = f"the newest checkpoint in storage is that of step {saved[1]:,}"
    text = f"{what}, {age_text(since_s, now_s)} ago, and one is due every {seconds_text(period_s)}"
    is_old = age_s > OLD_PERIODS * period_s + OLD_S
    yield Reason(ReasonCode.CHECKPOINT_OLD if is_old else ReasonCode.SAVE_LATE, text, since_s)


def _disks(activity: JobActivity) -> Iterator[Reason]:
    """Yield a reason for each directory on a disk that is nearly full, or soon will be.

    If hosts report different space for a directory, the least counts.
    """
    least: dict[str, tuple[str, DiskSpace, int]] = {}
    for view in activity.views:
        status = view.status
        for disk in () if status is None else status.disks:
            num_bytes = 0 if status is None or status.saves is None else status.saves.num_bytes
            found = (view.host, disk, num_bytes)
            if disk.path not in least or _urgency(disk) < _urgency(least[disk.path][1]):
                least[disk.path] = found
    for path, (host, disk, num_bytes) in least.items():
        left = f"{bytes_text(disk.free_bytes)} of {bytes_text(disk.total_bytes)} are free ({host})"
        if disk.free_bytes < max(_MIN_FREE_SAVES * num_bytes, _MIN_FREE_PART * disk.total_bytes):
            yield Reason(ReasonCode.DISK_FILLING, f"the disk of {path} is nearly full: {left}", None, (host,))
        elif disk.full_in_s is not None and disk.full_in_s < SOON_S:
            hours = count_text(max(1, round(disk.full_in_s / 3600)), "hour")
            text = f"the disk of {path} will be full in {hours}: {left}"
            yield Reason(ReasonCode.DISK_FILLING, text, None, (host,))


def _urgency(disk: DiskSpace) -> tuple[int, float]:
    return disk.free_bytes, float("inf") if disk.full_in_s is None else disk.full_in_s
