"""An incident: the problem, the evidence, the action and the cost. One record per incident, in etcd and on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from megatrain.contracts.records.host_records import RankFailure
from megatrain.contracts.records.notices import Receipt
from megatrain.contracts.records.rounds import Rollback


class IncidentKind(StrEnum):
    FAILURE = "failure"
    """A worker exited."""
    HANG = "hang"
    """No progress although processes live."""
    HOST_LOST = "host-lost"
    """An executor exited or lost its connection."""
    REQUEST = "request"
    """A person requested a restart or an eviction."""
    CONTROL_PLANE = "control-plane"
    """Leases vanished while training continued. The incident is held, and no host is evicted."""
    STRAGGLER = "straggler"
    """A verdict of the diagnosis: the job saves, and continues without the hosts that slow it down."""
    NUMERICS = "numerics"
    """A verdict of the diagnosis: loss or gradients jumped or are not finite; the job goes back to an earlier step."""
    LAUNCH_LOST = "launch-lost"
    """The previous launch left no record of its end: its launcher, or all of its machines, died."""


class IncidentState(StrEnum):
    OPEN = "open"
    RECOVERED = "recovered"
    """A step has been completed since the recovery."""
    STOPPED = "stopped"
    """The incident ended the job."""
    HELD = "held"
    """No action was necessary."""


@dataclass(frozen=True, slots=True)
class Moments:
    """When each part of a recovery ended, in unix seconds; None: not yet, or never."""

    began: float
    """When the failure happened, by its host's clock."""
    detected: float
    """When the driver received the first sign of it."""
    decided: float | None = None
    halted: float | None = None
    """The last host reported that its workers are gone."""
    round_written: float | None = None
    joined: float | None = None
    loaded: float | None = None
    first_step: float | None = None


TOPIC_PREFIX = "incident/"
OVER_NOTE = "over_unix_s"
"""Key in `notes` of a held incident: the time at which the hold ended."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One incident. Ids sort by time."""

    incident_id: str
    kind: IncidentKind
    state: IncidentState
    round: int
    """The round in which it happened."""
    moments: Moments
    reason: str
    """The driver's decision as a sentence."""
    action: str
    """restart, evict, rollback, stop, requeue or hold."""
    culprit_hosts: tuple[str, ...] = ()
    culprit_ranks: tuple[int, ...] = ()
    confidence: str = ""
    evidence: tuple[str, ...] = ()
    """Sentences, the strongest first: exit codes, log lines, which rank waits for which, a port that refused."""
    failures: tuple[RankFailure, ...] = ()
    label: str = ""
    next_round: int | None = None
    last_step: int | None = None
    """Steps that were completed before the incident."""
    resumed_step: int | None = None
    driver: str = ""
    effective_time_ratio: float | None = None
    """The share of the job's time that was training, until the incident was closed."""
    verdict: str = ""
    """The id of the verdict that caused it."""
    rollback: Rollback | None = None
    """The rollback that the next round performs."""
    notes: Mapping[str, str] = field(default_factory=dict)
    receipts: tuple[Receipt, ...] = ()
    """Notifications of the incident, by receiver and then by time."""

    @property
    def topic(self) -> str:
        """Its name in notifications."""
        return f"{TOPIC_PREFIX}{self.incident_id}"

    @property
    def steps_lost(self) -> int | None:
        """The number of steps that had to be repeated, None while unknown."""
        if self.last_step is None or self.resumed_step is None:
            return None
        return max(0, self.last_step - self.resumed_step)


PHASES = ("detect", "decide", "stop", "rendezvous", "load", "first_step")


def phase_begins(moments: Moments) -> dict[str, float | None]:
    """Return when each phase of a recovery began, None for phases that have not."""
    return dict(zip(PHASES, _phase_times(moments), strict=False))


def phase_seconds(moments: Moments) -> dict[str, float | None]:
    """Return the seconds of each phase of a recovery, None for unfinished phases."""
    times = _phase_times(moments)
    return {
        phase: None if before is None or after is None else max(0.0, after - before)
        for phase, before, after in zip(PHASES, times, times[1:], strict=False)
    }


def _phase_times(moments: Moments) -> tuple[float | None, ...]:
    return (
        moments.began,
        moments.detected,
        moments.decided,
        moments.halted,
        moments.joined,
        moments.loaded,
        moments.first_step,
    )
