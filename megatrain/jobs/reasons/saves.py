"""Do checkpoints get to storage, how old is the newest, and has the disk room for the next ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatrain.contracts.host_records import DiskRoom, HostSaves
from megatrain.contracts.texts import age_text, bytes_text, count_text, seconds_text
from megatrain.jobs.health import Reason, ReasonCode
from megatrain.jobs.job_state import JobState, Standing
from megatrain.jobs.reasons.training import number_of
from megatrain.jobs.snapshot import JobSnapshot

FAILS = 2
"""So many snapshots in a row that storage did not take are no accident any more."""
LATE_PERIODS, LATE_S = 2.0, 60.0
OLD_PERIODS, OLD_S = 4.0, 600.0
"""The newest checkpoint is late, or too old, when it is older than so many periods and so many seconds more."""
SOON_S = 24 * 3600.0
"""A disk that will be full within this is worth a word."""
_LEAST_PART = 0.01
_LEAST_SAVES = 2


def reasons_of_saves(snapshot: JobSnapshot, standing: Standing, now_s: float) -> Iterator[Reason]:
    """Yield what is wrong with checkpoints and with the room for them."""
    told = {
        view.host: view.status.saves
        for view in standing.members
        if view.status is not None and view.status.saves is not None
    }
    yield from _failures(told)
    if snapshot.report is not None and snapshot.report.checkpoint_damage:
        way_out = "`megatrain job checkpoint` saves now"
        yield Reason(ReasonCode.CHECKPOINT_DAMAGED, f"{snapshot.report.checkpoint_damage}; {way_out}")
    yield from _age(snapshot, standing, told, now_s)
    yield from _disks(standing)


def _period_s(config: Mapping[str, str], standing: Standing) -> float | None:
    """Return how often a checkpoint is due, None where none is, or that is not known yet.

    Taken by time they come as often as rank 0 says: more seldom than is configured, where they cost much.
    """
    interval = number_of(config, "checkpoint.interval")
    if interval is not None:
        median_step_s = standing.progress.median_step_s
        return None if median_step_s is None else interval * median_step_s
    told = [view.status.save_interval_s for view in standing.members if view.status is not None]
    in_force = max((one for one in told if one is not None), default=None)
    return number_of(config, "checkpoint.interval_s") if in_force is None else in_force


def _failures(told: Mapping[str, HostSaves]) -> Iterator[Reason]:
    if not told:
        return
    host = max(told, key=lambda name: told[name].num_failed)
    saves = told[host]
    hosts = tuple(name for name, one in told.items() if one.num_failed)
    if saves.num_failed >= FAILS:
        text = f"storage has not taken the last {saves.num_failed} checkpoints ({host}): {saves.error}"
        yield Reason(ReasonCode.SAVES_FAIL, text, saves.failing_unix_s, hosts)
    elif saves.num_failed:
        text = f"storage did not take the last checkpoint, the next one is tried ({host}): {saves.error}"
        yield Reason(ReasonCode.SAVE_FAILED, text, saves.failing_unix_s, hosts)


def _age(snapshot: JobSnapshot, standing: Standing, told: Mapping[str, HostSaves], now_s: float) -> Iterator[Reason]:
    """Yield the reason where a checkpoint is due for too long. Counted from when the round began to train, at least:
    until then nothing could be saved."""
    config = {} if snapshot.record is None else snapshot.record.config
    period_s = _period_s(config, standing)
    firsts = [view.status.milestones.first_step_unix_s for view in standing.members if view.status is not None]
    began_s = max((one for one in firsts if one is not None), default=None)
    if period_s is None or began_s is None or standing.state is not JobState.TRAINING:
        return
    saved = max(((one.saved_unix_s, one.saved_step) for one in told.values() if one.saved_unix_s is not None),
                default=None)  # fmt: skip
    since_s = began_s if saved is None else max(began_s, saved[0])
    age_s = now_s - since_s
    if age_s <= LATE_PERIODS * period_s + LATE_S:
        return
    what = "no checkpoint has got to storage since training began"
    if saved is not None and saved[0] >= began_s:
        what = f"the newest checkpoint in storage is that of step {saved[1]:,}"
    text = f"{what}, {age_text(since_s, now_s)} ago, and one is due every {seconds_text(period_s)}"
    is_old = age_s > OLD_PERIODS * period_s + OLD_S
    yield Reason(ReasonCode.CHECKPOINT_OLD if is_old else ReasonCode.SAVE_LATE, text, since_s)


def _disks(standing: Standing) -> Iterator[Reason]:
    """Yield a reason for each directory whose disk is nearly full, or will be: as the host sees it that has least."""
    least: dict[str, tuple[str, DiskRoom, int]] = {}
    for view in standing.views:
        status = view.status
        for room in () if status is None else status.disks:
            num_bytes = 0 if status is None or status.saves is None else status.saves.num_bytes
            found = (view.host, room, num_bytes)
            if room.path not in least or _urgency(room) < _urgency(least[room.path][1]):
                least[room.path] = found
    for path, (host, room, num_bytes) in least.items():
        left = f"{bytes_text(room.free_bytes)} of {bytes_text(room.total_bytes)} are free ({host})"
        if room.free_bytes < max(_LEAST_SAVES * num_bytes, _LEAST_PART * room.total_bytes):
            yield Reason(ReasonCode.DISK_FILLING, f"the disk of {path} is nearly full: {left}", None, (host,))
        elif room.full_in_s is not None and room.full_in_s < SOON_S:
            hours = count_text(max(1, round(room.full_in_s / 3600)), "hour")
            text = f"the disk of {path} will be full in {hours}: {left}"
            yield Reason(ReasonCode.DISK_FILLING, text, None, (host,))


def _urgency(room: DiskRoom) -> tuple[int, float]:
    return room.free_bytes, float("inf") if room.full_in_s is None else room.full_in_s
