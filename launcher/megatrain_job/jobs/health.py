"""The health of a job: a level and the reasons for it, the same in every command and page.

    red     the job does not train and does not recover in time, its checkpoints fail, the restart limit is reached,
            its coordination is lost, or one of its GPUs is broken
    amber   the job recovers or waits for hosts or a person, a limit that makes it red is near, a host or the driver
            has a problem, or telemetry is missing
    green   none of these

Each reason has a code that never changes its meaning: alerts and notes refer to it. docs/runbooks/health.md
has the remedy for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class HealthLevel(StrEnum):
    """The urgency with which a job needs a person."""

    GREEN = "green"
    AMBER = "amber"
    """Needs attention today."""
    RED = "red"
    """Needs attention now."""


class ReasonCode(StrEnum):
    """The reason why a job is not green."""

    STUCK = "stuck"
    BROKEN = "broken"
    HOST_LOST = "host-lost"
    NOT_RUNNING = "not-running"
    FAILED = "failed"
    LATE = "late"
    RESTART_LIMIT = "brake"
    """docs/glossary.md has this code under "restart limit"."""
    SAVES_FAIL = "saves-fail"
    CHECKPOINT_OLD = "checkpoint-old"
    CHECKPOINT_DAMAGED = "checkpoint-damaged"
    ETCD_ALARM = "etcd-alarm"
    COORDINATION_LOST = "coordination-lost"
    GPU_FAILING = "gpu-failing"
    FILES_REMOVED = "files-removed"
    UNREACHABLE = "unreachable"
    RECOVERING = "recovering"
    REQUESTED = "requested"
    WAITING_FOR_HOSTS = "waiting-for-hosts"
    HELD = "held"
    STEP_LATE = "step-late"
    SAVE_FAILED = "save-failed"
    SAVE_LATE = "save-late"
    DISK_FILLING = "disk-filling"
    RESTART_BUDGET = "restart-budget"
    VERDICT_WAITING = "verdict-waiting"
    VERDICT_UNANSWERED = "verdict-unanswered"
    DAEMON_SILENT = "daemon-silent"
    DAEMON_PROBLEM = "daemon-problem"
    STREAMER_SILENT = "streamer-silent"
    METRICS_SILENT = "metrics-silent"
    RANK_SILENT = "rank-silent"
    GPU_DEGRADED = "gpu-degraded"
    NETWORK_DEGRADED = "network-degraded"
    TELEMETRY_SILENT = "telemetry-silent"
    NO_DRIVER = "no-driver"
    DIRECTORY_REMOVED = "directory-removed"
    DRIVER_ALARM = "driver-alarm"
    HOST_UNFIT = "host-unfit"
    HOST_PROBLEM = "host-problem"
    RECORD_UNREADABLE = "record-unreadable"


_RED_RUNBOOKS: Mapping[ReasonCode, str] = {
    ReasonCode.STUCK: "hang.md",
    ReasonCode.BROKEN: "worker-ended.md",
    ReasonCode.HOST_LOST: "host-evicted-or-cordoned.md",
    ReasonCode.NOT_RUNNING: "job-does-not-start.md",
    ReasonCode.FAILED: "job-does-not-start.md",
    ReasonCode.LATE: "waits-for-hosts.md",
    ReasonCode.RESTART_LIMIT: "stopped-by-the-brake.md",
    ReasonCode.SAVES_FAIL: "checkpoints.md",
    ReasonCode.CHECKPOINT_OLD: "checkpoints.md",
    ReasonCode.CHECKPOINT_DAMAGED: "checkpoints.md",
    ReasonCode.ETCD_ALARM: "etcd.md",
    ReasonCode.COORDINATION_LOST: "etcd.md",
    ReasonCode.GPU_FAILING: "gpu-errors.md",
    ReasonCode.FILES_REMOVED: "files-removed.md",
    ReasonCode.UNREACHABLE: "etcd.md",
}
"""The reasons for red health. All other reasons are amber."""
_RUNBOOK_OF: Mapping[ReasonCode, str] = {
    **_RED_RUNBOOKS,
    ReasonCode.RECOVERING: "health.md#recovering",
    ReasonCode.REQUESTED: "health.md#recovering",
    ReasonCode.WAITING_FOR_HOSTS: "waits-for-hosts.md",
    ReasonCode.HELD: "etcd.md",
    ReasonCode.STEP_LATE: "slow-steps.md",
    ReasonCode.SAVE_FAILED: "checkpoints.md",
    ReasonCode.SAVE_LATE: "checkpoints.md",
    ReasonCode.DISK_FILLING: "disk-full.md",
    ReasonCode.RESTART_BUDGET: "stopped-by-the-brake.md",
    ReasonCode.VERDICT_WAITING: "verdict.md",
    ReasonCode.VERDICT_UNANSWERED: "verdict.md",
    ReasonCode.DAEMON_SILENT: "diagnostics.md",
    ReasonCode.DAEMON_PROBLEM: "diagnostics.md",
    ReasonCode.STREAMER_SILENT: "diagnostics.md",
    ReasonCode.METRICS_SILENT: "diagnostics.md",
    ReasonCode.RANK_SILENT: "silent-rank.md",
    ReasonCode.GPU_DEGRADED: "gpu-errors.md",
    ReasonCode.NETWORK_DEGRADED: "gpu-errors.md#links",
    ReasonCode.TELEMETRY_SILENT: "gpu-errors.md#telemetry-is-silent",
    ReasonCode.NO_DRIVER: "health.md#no-driver",
    ReasonCode.DIRECTORY_REMOVED: "files-removed.md",
    ReasonCode.DRIVER_ALARM: "health.md#driver-alarm",
    ReasonCode.HOST_UNFIT: "host-evicted-or-cordoned.md",
    ReasonCode.HOST_PROBLEM: "health.md#host-problem",
    ReasonCode.RECORD_UNREADABLE: "etcd.md",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why a job is not green, as a sentence with figures. since_unix_s: when it began; None if unknown."""

    code: ReasonCode
    text: str
    since_unix_s: float | None = None
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def level(self) -> HealthLevel:
        return HealthLevel.RED if self.code in _RED_RUNBOOKS else HealthLevel.AMBER

    @property
    def runbook(self) -> str:
        """The page below docs/runbooks, with an anchor if the page has several topics."""
        return _RUNBOOK_OF[self.code]


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a job. `reasons`: the red ones first."""

    reasons: tuple[Reason, ...] = ()

    @property
    def level(self) -> HealthLevel:
        return self.reasons[0].level if self.reasons else HealthLevel.GREEN


def health_of(reasons: Iterable[Reason]) -> Health:
    """Return the health that follows from reasons; reasons of one level keep their order."""
    return Health(tuple(sorted(reasons, key=lambda reason: reason.level is not HealthLevel.RED)))
