"""Computes when the workers of unreachable hosts are certainly gone, and the deadlines that hosts must keep.

Pure functions: no I/O and no clock. The rule is in `megatrain.fencing.fence`: hosts enforce it, and the driver waits
until its deadlines have passed. This module determines the rule's inputs for a round.
"""

from __future__ import annotations

from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.rounds import MAX_INTERVAL_S, Round, RoundDeadlines, RoundHost
from megatrain_launcher.driver.actions import Alarm, DriverAction, RaiseDeadlines
from megatrain_launcher.driver.incidents import statuses_in
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.state import ClusterState

_PROVING_STEPS = 2
"""If another host has completed this many steps of the round, this host has completed its first step: the other host's
second step needs data that this host sends after its first."""


def published_deadlines(state: ClusterState, policy: Policy, round_: Round) -> RoundDeadlines:
    """Return the interval and stop time that were published to the hosts of a round; zeros if there are none.

    If the record is no longer readable, the last readable times are raised to fit the times that hosts report.
    """
    published = state.deadlines.get(round_.number, RoundDeadlines(round_.number))
    if state.keys.deadlines(round_.number) not in state.damaged:
        return published
    # hosts may use longer times than the last readable ones, so the reported times count too
    rule = policy.fence_rule
    return RoundDeadlines(
        round_.number,
        interval_s=max(
            published.interval_s, rule.interval_to_publish(0.0, _seen_interval_s(state, round_) or 0.0) or 0.0
        ),
        stop_s=max(published.stop_s, rule.stop_to_publish(0.0, _seen_stop_s(state, round_)) or 0.0),
    )


def grace_s(state: ClusterState, policy: Policy, round_: Round) -> float:
    """Return how long a round's workers may take to save and stop, by the rule that hosts enforce."""
    return policy.fence_rule.grace_s(published_deadlines(state, policy, round_).stop_s)


def raise_deadlines(state: ClusterState, policy: Policy, round_: Round) -> tuple[DriverAction, ...]:
    """Return the action that publishes longer deadlines, or publishes them again if their record is lost.

    Adds an alarm if steps and saves take so long that the driver waits beyond join_timeout_s for a host that is cut
    off.
    """
    rule, published = policy.fence_rule, published_deadlines(state, policy, round_)
    key = state.keys.deadlines(round_.number)
    longer_s = rule.interval_to_publish(published.interval_s, _seen_interval_s(state, round_) or 0.0)
    longer_stop_s = rule.stop_to_publish(published.stop_s, _seen_stop_s(state, round_))
    wanted = RoundDeadlines(
        round_.number,
        interval_s=min(MAX_INTERVAL_S, longer_s or published.interval_s),
        stop_s=min(MAX_INTERVAL_S, longer_stop_s or published.stop_s),
    )
    # write an unreadable or removed record again even if its values are the same, so that hosts can read it
    is_lost = key in state.damaged or key not in state.seen
    actions: tuple[DriverAction, ...] = ()
    if wanted != published or (is_lost and wanted != RoundDeadlines(round_.number)):
        seen = state.seen.get(key)
        actions = (RaiseDeadlines(wanted, 0 if seen is None else seen.mod_revision),)
    limits = rule.deadlines(wanted.interval_s, wanted.stop_s)
    if limits.end_s > max(policy.join_timeout_s, rule.deadlines(0.0).end_s):
        text = (
            f"steps and saves take so long that a host that is cut off is replaced only after up to "
            f"{limits.end_s:.0f} s, beyond recovery.join_timeout_s={policy.join_timeout_s:g}: its workers continue for "
            f"{limits.silent_s:.0f} s after each step"
        )
        actions = (*actions, Alarm("fence", text))
    return actions


def workers_gone_at(state: ClusterState, policy: Policy, round_: Round, part: RoundHost, lease_gone_at: float) -> float:
    """Return when a host's workers are certainly gone, by the deadlines that the host enforces without a lease."""
    others = [host for host in round_.hosts if host.host != part.host]
    moments = [at for host in others if (at := _stuck_since(state, round_, host)) is not None]
    seen_s, published = _seen_interval_s(state, round_), published_deadlines(state, policy, round_)
    return policy.fence_rule.workers_gone_at(
        lease_gone_at=lease_gone_at,
        stuck_since=min(moments, default=None),
        published_s=published.interval_s,
        published_stop_s=published.stop_s,
        seen_s=policy.hang_floor_s if seen_s is None else seen_s,
        has_stepped=_has_stepped(state, round_, part, others),
    )


def _seen_interval_s(state: ClusterState, round_: Round) -> float | None:
    found = [status.interval_s for status in statuses_in(state, round_) if status.interval_s is not None]
    return max(found, default=None)


def _seen_stop_s(state: ClusterState, round_: Round) -> float:
    found = [status.stop_s for status in statuses_in(state, round_) if status.stop_s is not None]
    return max(found, default=0.0)


def _stuck_since(state: ClusterState, round_: Round, part: RoundHost) -> float | None:
    """Return the time after which a host of a round certainly completes no further step; None if it may complete one.

    After it, every other host can complete at most one more step. None for a host that has finished its training,
    because the other hosts may still be saving. A stall counts only while the host is registered, because a host that
    is cut off cannot report further steps.
    """
    status = state.status_of(part, round_.number)
    if status is not None and (status.phase is HostPhase.DONE or status.exit_code is not None):
        return None
    is_registered = state.is_registered(part)
    if is_registered and status is not None and status.stall is not None and part.host in state.stalled_since:
        return state.stalled_since[part.host] - status.stall.silent_s
    if state.has_stopped(part, round_.number):
        assert status is not None
        # its last step was before its stop, and other hosts can be at most one step ahead
        has_stepped = status.min_step is not None and part.host in state.advanced_at
        if has_stepped:
            return state.advanced_at[part.host]
        # the later of the two times: a host that left may have no status key
        return max(state.seen_at(state.keys.status(part.host)), state.gone_since(part))
    return state.proven_at(part) if state.proof_of_death(part) else None


def _has_stepped(state: ClusterState, round_: Round, part: RoundHost, others: list[RoundHost]) -> bool:
    """Return whether a host has certainly completed a step: it reported one, or another host has completed two."""
    own = state.status_of(part, round_.number)
    if own is not None and own.min_step is not None:
        return True
    known = (state.status_of(host, round_.number) for host in others)
    return any(
        status is not None
        and status.min_step is not None
        and status.min_step - (status.resumed_step or 0) >= _PROVING_STEPS
        for status in known
    )
