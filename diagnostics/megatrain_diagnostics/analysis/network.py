"""Finds a slow network: transfers that take long although all ranks of a group have arrived.

The rank of a group with the least time in its collectives arrived last, so its time is nearly the transfer alone. This
needs no aligned clocks. A group is compared with other groups of its kind, by time per byte, and with its own past. A
slow pipeline link is not found in this way, because it shows only in receives. So the network is also reported, by
elimination, if steps became longer and no rank spends more time on compute, data or garbage collection.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from megatrain_diagnostics.analysis.findings import Thresholds
from megatrain_diagnostics.analysis.history import ComparedSteps
from megatrain_diagnostics.analysis.own_time import Aspect
from megatrain_diagnostics.events.roster import Roster, groups_along, replica_groups
from megatrain_diagnostics.events.tables import Float64, Int64

_TIMES = 1.5
"""A transfer is slow if it takes this many times its past duration, or the duration expected from other groups."""
_MIN_PAST = 4
"""Number of past steps that are needed for a comparison with the past."""


class HostEvidence(Enum):
    """How the slow groups show which hosts are the cause."""

    WITHIN_HOST = auto()
    """Each slow group lies on a single host: its own links are slow, even if other groups of this host are not."""
    ONLY_SLOW = auto()
    """The hosts are in all slow groups and in no other group."""
    ALSO_SOUND = auto()
    """The hosts are in all slow groups, but also in groups that are not slow."""
    NONE = auto()
    """No host is in all slow groups: the hosts of all of them are named."""


@dataclass(frozen=True, slots=True)
class SlowSteps:
    """The slow steps of a window."""

    first_step: int
    """The first slow step."""
    num_steps: int
    """Number of compared steps from `first_step` on; `num_seen` of them were slow."""
    num_seen: int


@dataclass(frozen=True, slots=True)
class SlowNetwork:
    """A kind of group with slow transfers. Units: seconds per step."""

    kind: str
    """"data-parallel", "tensor-parallel", or "waiting", which is found by elimination."""
    hosts: tuple[str, ...]
    """Hosts that may be the cause; none for "waiting"."""
    host_evidence: HostEvidence
    ranks: tuple[int, ...]
    excess_s: float
    now_s: float
    before_s: float
    """Past duration, or else the expected duration from other groups."""
    is_against_peers: bool
    is_against_past: bool
    slow_steps: SlowSteps
    """Steps of the longer window whose duration was nearer to `now_s` than to `before_s`."""

    @property
    def is_host_certain(self) -> bool:
        """Whether the slow groups show a single host as the cause."""
        is_shown = self.host_evidence in (HostEvidence.WITHIN_HOST, HostEvidence.ONLY_SLOW)
        return is_shown and len(self.hosts) == 1


def slow_groups(
    window: ComparedSteps,
    longer: ComparedSteps,
    past: ComparedSteps,
    bytes_of: dict[str, Float64],
    roster: Roster,
    thresholds: Thresholds,
) -> tuple[SlowNetwork, ...]:
    """Return the kinds of groups that contain slow groups.

    `longer`: a longer window of the newest steps, to count the slow ones; `bytes_of`: kind -> bytes per rank and step.
    """
    layout = roster.layout
    of_tp = groups_along(layout, "tp")
    stage_scale = np.median(window.scale, axis=0)[of_tp[:, 0, 0]].astype(np.float64)
    found = []
    of_dp = replica_groups(layout)
    for kind, now, before, members in (
        ("data-parallel", window.dp_transfer_s, past.dp_transfer_s, of_dp),
        ("tensor-parallel", window.tp_transfer_s, past.tp_transfer_s, of_tp),
    ):
        if members.shape[2] < 2 or not len(window.steps):
            continue
        if not _has_step_risen(window, past, thresholds):
            before = before[:0]  # the step did not become longer, so longer transfers are overlapped with compute
        slow_group = _slow_kind(kind, now, longer, before, members, bytes_of[kind], stage_scale, roster, thresholds)
        if slow_group is not None:
            found.append(slow_group)
    return tuple(found)


def _has_step_risen(window: ComparedSteps, past: ComparedSteps, thresholds: Thresholds) -> bool:
    if len(past.steps) < _MIN_PAST:
        return False
    return bool(np.median(window.step_s) >= (1.0 + thresholds.excess) * np.median(past.step_s))


def _slow_kind(
    kind: str,
    now: Float64,
    longer: ComparedSteps,
    before: Float64,
    members: np.ndarray,
    bytes_of: Float64,
    stage_scale: Float64,
    roster: Roster,
    thresholds: Thresholds,
) -> SlowNetwork | None:
    seconds = np.median(now, axis=0)
    least = thresholds.excess * stage_scale[:, None]
    is_seen = (now >= least).mean(axis=0) >= 0.5
    usual = np.median(before, axis=0) if len(before) >= _MIN_PAST else seconds
    against_past = (seconds - usual >= least) & (seconds >= _TIMES * usual) & is_seen
    expected = _expected(seconds, bytes_of[members[:, :, 0]])
    against_peers = (seconds - expected >= least) & (seconds >= _TIMES * expected) & is_seen
    is_slow = against_past | against_peers
    if not is_slow.any():
        return None
    excess = np.where(against_past, seconds - usual, seconds - expected) * is_slow
    worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
    before_s = float((usual if against_past[worst] else expected)[worst])
    slow, sound = (
        [{roster.host_of(rank) for rank in ranks} for ranks in groups.tolist()]
        for groups in (members[is_slow], members[~is_slow])
    )
    hosts, host_evidence = _suspects(slow, sound)
    lately = (longer.dp_transfer_s if kind == "data-parallel" else longer.tp_transfer_s)[:, worst[0], worst[1]]
    return SlowNetwork(
        kind=kind,
        hosts=hosts,
        host_evidence=host_evidence,
        ranks=tuple(sorted(members[is_slow].ravel().tolist())),
        excess_s=float(excess[worst]),
        now_s=float(seconds[worst]),
        before_s=before_s,
        is_against_peers=bool(against_peers[worst]),
        is_against_past=bool(against_past[worst]),
        slow_steps=_slow_steps(longer.steps, lately, before_s, float(seconds[worst])),
    )


def _slow_steps(steps: Int64, durations: Float64, before_s: float, now_s: float) -> SlowSteps:
    slow = np.flatnonzero(durations >= (before_s + now_s) / 2)
    return SlowSteps(int(steps[slow[0]]), len(steps) - int(slow[0]), len(slow))


def _expected(seconds: Float64, num_bytes: Float64) -> Float64:
    """Return each group's time at the median speed of the OTHER groups; its own time if there are fewer than two."""
    speed = np.where(num_bytes > 0.0, seconds / np.maximum(num_bytes, 1.0), 0.0).ravel()
    known = np.flatnonzero(num_bytes.ravel() > 0.0)
    expected = seconds.ravel().copy()
    for place in known.tolist():
        others = known[known != place]
        if len(others) >= 2:
            expected[place] = np.median(speed[others]) * num_bytes.ravel()[place]
    return expected.reshape(seconds.shape)


def _suspects(slow: list[set[str]], sound: list[set[str]]) -> tuple[tuple[str, ...], HostEvidence]:
    """Return the hosts that may be the cause, and how the groups show it. `slow`, `sound`: hosts of each group."""
    of_any, of_all = set().union(*slow), slow[0].intersection(*slow[1:])
    never_sound = of_all.difference(*sound)
    if all(len(hosts) == 1 for hosts in slow):
        found, shown = of_any, HostEvidence.WITHIN_HOST
    elif never_sound:
        found, shown = never_sound, HostEvidence.ONLY_SLOW
    elif of_all:
        found, shown = of_all, HostEvidence.ALSO_SOUND
    else:
        found, shown = of_any, HostEvidence.NONE
    return tuple(sorted(found)), shown


def by_elimination(
    window: ComparedSteps, longer: ComparedSteps, past: ComparedSteps, thresholds: Thresholds
) -> SlowNetwork | None:
    """Return a slow network if steps became longer, but no rank's compute, data wait or garbage collection did."""
    if len(past.steps) < _MIN_PAST or not len(window.steps):
        return None
    now_s, before_s = float(np.median(window.step_s)), float(np.median(past.step_s))
    excess_s = now_s - before_s
    is_long = window.step_s >= before_s + thresholds.excess * before_s
    if before_s <= 0.0 or excess_s < thresholds.excess * before_s or is_long.mean() < 0.5:
        return None
    risen = np.median(window.own, axis=0) - np.median(past.own, axis=0)
    risen[Aspect.GC] = window.own[:, Aspect.GC].mean(axis=0) - past.own[:, Aspect.GC].mean(axis=0)
    risen[Aspect.DATA] = window.own[:, Aspect.DATA].mean(axis=0) - past.own[:, Aspect.DATA].mean(axis=0)
    own = risen[[Aspect.COMPUTE, Aspect.DATA, Aspect.GC]].clip(min=0.0).sum(axis=0)
    if own.max() >= 0.5 * excess_s or np.median(risen[Aspect.WAIT]) < 0.5 * excess_s:
        return None
    waiting = np.flatnonzero(risen[Aspect.WAIT] >= 0.5 * excess_s)
    return SlowNetwork(
        kind="waiting", hosts=(), host_evidence=HostEvidence.NONE, ranks=tuple(waiting.tolist()), excess_s=excess_s,
        now_s=now_s, before_s=before_s, is_against_peers=False, is_against_past=True,
        slow_steps=_slow_steps(longer.steps, longer.step_s, before_s, now_s),
    )  # fmt: skip
