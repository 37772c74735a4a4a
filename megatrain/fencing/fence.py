"""How long workers may run after their host's lease ended. The host and the driver apply the same rule.

A host that is cut off from etcd does not receive the halt of its round. So it stops its workers by itself, and the
driver replaces it only when its workers must be gone. All ranks complete a step together, so a host that completes a
step had not been replaced when the step began. Without a lease there are three deadlines:

- `silent_s` after the last completed step, the workers are killed: the job may have continued without this host.
- `save_s` after the lease ended, the workers save and stop even if steps are completed.
- `end_s` after the lease ended, the workers are killed if they still run.

Workers that have not completed a step may run for `start_s` after the lease ended. All deadlines follow from the
configuration and from two published numbers: the interval between two steps, and the time of a stop. The driver
publishes a number before any host may use it, and never replaces it by a smaller one in the same round. So the
deadlines of a host that is cut off are never later than those that the driver waits for. Clock rates may differ by 1 %.
A host that does not run (frozen, paused, in state D) cannot stop its workers; the round's number makes their later
writes fail. Pure functions: no I/O and no clock. See docs/adr/0036.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from megatrain.contracts.black_box.values import Phase, Progress

_NS = 1_000_000_000
_SILENT_INTERVALS = 3.0
"""Number of step intervals that may pass without a completed step."""
_MARGIN = 1.25
"""Ratio of the published to the measured interval, so that slightly longer steps need no new value."""
_PART_OF_JOIN = 0.9
_SAVE_SLACK_S = 5.0
"""An executor kills workers that save before they stop at most this long after their grace period."""
_START_TTLS = 3
CLOCK_RATE = 1.01
"""Largest ratio of two clocks' rates."""
REACTION_S = 1.5
"""From a deadline until the workers are gone: an executor checks every 0.1 s, a watchdog every 0.5 s, and
each needs two equal results in a row."""
_STOP_FACTOR = 2.0
"""Ratio of the published to the measured stop time, so that a slow step and a slow save still fit."""
_MIN_STOP_FACTOR = 1.5
"""The published value is at least this multiple of the measured one; else a new value is published."""
_LAST_STEP_FACTOR = 2.0
"""Multiple of the interval: a host completes a step at most one step's time after the others."""
_STEP_SLACK_S = 1.0


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A host's lease. `gone_s`: seconds since it ended by this host's clock; 0 or less while it is valid.

    `has_lost_orders`: the host has received no orders for so long that it counts as a host without a lease. Then
    `gone_s` is the time since it began to count as such.
    """

    gone_s: float
    has_lost_orders: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether the driver may already consider this host dead."""
        return self.gone_s > 0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """In seconds; see the top of this file."""

    start_s: float
    silent_s: float
    save_s: float
    end_s: float


class FenceAction(Enum):
    """What a host without a lease does with its workers."""

    GO_ON = "go on"
    SAVE = "save and stop"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceRule:
    """The limits of a job's configuration that all deadlines follow from."""

    lease_ttl_s: float
    floor_s: float
    join_timeout_s: float
    save_grace_s: float

    def deadlines(self, interval_s: float, stop_s: float = 0.0) -> Deadlines:
        """Return the deadlines of a round that needs `interval_s` from step to step, and `stop_s` to stop.

        A value of 0 means that it is not known yet.
        """
        silent_s = max(self.floor_s, _SILENT_INTERVALS * interval_s)
        saving_s = self.grace_s(stop_s) + _SAVE_SLACK_S
        end_s = max(_PART_OF_JOIN * self.join_timeout_s, 2 * silent_s + saving_s)
        return Deadlines(_START_TTLS * self.lease_ttl_s, silent_s, end_s - saving_s, end_s)

    def grace_s(self, stop_s: float) -> float:
        """Return how long workers have to save and stop, in a round whose published limit is `stop_s`."""
        return max(self.save_grace_s, stop_s)

    def stop_to_publish(self, published_s: float, seen_s: float) -> float | None:
        """Return the stop time to publish when hosts report `seen_s`; None if `published_s` suffices."""
        return longer_stop_s(self.grace_s(published_s), seen_s)

    def interval_to_publish(self, published_s: float, seen_s: float) -> float | None:
        """Return the interval to publish when hosts report `seen_s`; None if `published_s` suffices."""
        interval_s = _MARGIN * seen_s
        if seen_s <= published_s or self.deadlines(interval_s) == self.deadlines(published_s):
            return None
        return interval_s

    def workers_gone_at(
        self,
        *,
        lease_gone_at: float,
        stuck_since: float | None,
        published_s: float,
        seen_s: float,
        has_stepped: bool,
        published_stop_s: float = 0.0,
    ) -> float:
        """Return the time by which the workers of a running host without a lease are certainly gone.

        `stuck_since`: the time since which another host has completed no step; None if all may complete more steps.
        `published_s`, `published_stop_s`: the published values; `seen_s`: the interval that hosts report.
        `has_stepped`: whether the host has certainly completed a step in this round.
        """
        limits = self.deadlines(published_s, published_stop_s)
        # a host with a slower clock counts its lease as valid for longer
        slack_s = CLOCK_RATE * REACTION_S + (CLOCK_RATE - 1) * self.lease_ttl_s
        end = lease_gone_at + CLOCK_RATE * limits.end_s
        if stuck_since is None:
            return end + slack_s
        # the current step may still be completed, and `silent_s` counts from its end
        last_step_s = _LAST_STEP_FACTOR * seen_s + _STEP_SLACK_S
        silent = max(lease_gone_at, stuck_since + CLOCK_RATE * (last_step_s + limits.silent_s))
        if not has_stepped:
            silent = max(silent, lease_gone_at + CLOCK_RATE * limits.start_s)
        return min(end, silent) + slack_s


@dataclass(frozen=True, slots=True)
class StepSilence:
    """The progress of a host's ranks. `silent_s`: seconds since the slowest rank completed a step; None until each has
    completed one."""

    silent_s: float | None
    is_ending: bool = False
    """Training is over, and no step will follow: the ranks save, or close all that is open."""


def step_silence(ranks: Mapping[int, Progress], now_ns: int) -> StepSilence:
    """Return the progress of a host's ranks. `ranks`: those that have not exited."""
    if ranks and all(rank_progress.phase is Phase.STOPPING for rank_progress in ranks.values()):
        return StepSilence(None, is_ending=True)
    completed = [rank_progress.completed_ns for rank_progress in ranks.values()]
    known = [at_ns for at_ns in completed if at_ns is not None]
    if len(known) < len(completed) or not known:
        return StepSilence(None)
    return StepSilence(max(0.0, (now_ns - min(known)) / _NS))


def interval_of(progress: Progress) -> float | None:
    """Return the seconds that a rank needs from step to step; None before its first one.

    If a save or an evaluation between two steps takes longer than the steps, half of that pause counts: a host without
    a lease may be silent for three times the interval.
    """
    step_ns = step_ns_of(progress)
    if step_ns is None:
        return None
    pause_ns = step_ns + (progress.longest_checkpoint_ns or 0) + (progress.longest_evaluation_ns or 0)
    return max(step_ns, pause_ns / 2) / _NS


def longer_stop_s(known_s: float, seen_s: float) -> float | None:
    """Return the time to allow when `seen_s` was measured; None if `known_s` is long enough."""
    return None if _MIN_STOP_FACTOR * seen_s <= known_s else _STOP_FACTOR * seen_s


@dataclass(frozen=True, slots=True)
class StopTimes:
    """The measured seconds of each part of a rank's stop, 0 if not measured. The step is a typical one, and each other
    part the longest one.

    In the worst case the request comes when an evaluation, or without one a step, has just begun.
    """

    step_s: float
    evaluation_s: float
    snapshot_s: float
    write_s: float

    @property
    def total_s(self) -> float:
        """From the request until the state is in storage."""
        return self.step_s + self.evaluation_s + self.snapshot_s + self.write_s


def stop_times(progress: Progress) -> StopTimes | None:
    """Return the parts of a rank's stop time; None before its first step."""
    step_ns = step_ns_of(progress)
    if step_ns is None:
        return None
    parts_ns = (progress.longest_evaluation_ns, progress.longest_checkpoint_ns, progress.longest_write_ns)
    return StopTimes(step_ns / _NS, *((part_ns or 0) / _NS for part_ns in parts_ns))


def step_ns_of(progress: Progress) -> int | None:
    """Return the median time of a step; without a median, the time of the last step; None before the first step."""
    return progress.median_step_ns or progress.last_step_ns


def fence(limits: Deadlines, lease: LeaseView, ranks: StepSilence) -> tuple[FenceAction, str]:
    """Return what a host must do with its workers by itself, and why."""
    if not lease.is_gone:
        return FenceAction.GO_ON, ""
    doubt = f"this host fenced itself: it has held no lease for {lease.gone_s:.1f} s"
    if lease.has_lost_orders:
        doubt = (
            f"this host fenced itself: its orders do not arrive, and for {lease.gone_s:.1f} s that counts as no lease"
        )
    if lease.gone_s > limits.end_s:
        return FenceAction.STOP, f"{doubt} (limit {limits.end_s:.1f} s)"
    if ranks.silent_s is not None and ranks.silent_s > limits.silent_s:
        return FenceAction.STOP, (
            f"{doubt}, and no step was completed for {ranks.silent_s:.1f} s (limit {limits.silent_s:.1f} s)"
        )
    if ranks.silent_s is None and not ranks.is_ending and lease.gone_s > limits.start_s:
        return FenceAction.STOP, f"{doubt}, and no step of this round was completed (limit {limits.start_s:.1f} s)"
    if lease.gone_s > limits.save_s:
        return FenceAction.SAVE, f"{doubt} (limit {limits.save_s:.1f} s): its workers save and stop"
    return FenceAction.GO_ON, ""
