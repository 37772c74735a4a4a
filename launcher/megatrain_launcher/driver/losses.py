"""Hosts of a live round that are not registered: dead, cut off, or only unheard (decision 11). Pure.

A vanished lease is no proof while steps are completed. Proof is a port that refuses, or another life of the executor;
a second sign is a stall, a failure, or that no step is completed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.host_records import HostPhase
from megatrain.contracts.incident import Incident, IncidentKind, IncidentState
from megatrain.contracts.rounds import Round, RoundHost
from megatrain.contracts.texts import count_text
from megatrain_launcher.driver.actions import Action, Alarm, Decision, OpenIncident
from megatrain_launcher.driver.breaking import (
    break_round,
    broken_incident,
    probes_for,
    stall_began,
    stall_words,
    stalled_hosts,
)
from megatrain_launcher.driver.fences import gone_by
from megatrain_launcher.driver.incidents import OVER_NOTE, median_step_s, new_incident
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.responses import HOLD
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.executor.liveness import Vitality

_SLOW_STEPS = 3
"""A host without a lease is evicted when no step is completed for so many times the median step."""
_TOLERATED_S = 1.0
"""After an outage of etcd hosts register again one after the other: for so long that is no incident."""
_LEAST_HOSTS = 3
"""Of fewer hosts no fraction says anything about etcd."""
_MANY = 2
"""One host alone is lost by itself, however few there are."""
_MAX_HOLDS = 20
"""So many holds of a round get their own incidents; later ones are only logged: a lease may come and go for days."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Hosts of a round that are not registered. `dead`: those of which that is proven, with the proof."""

    gone: tuple[RoundHost, ...]
    dead: Mapping[str, str]


def absent_of(state: ClusterState, round_: Round) -> Absent:
    """Return the hosts of a round that are not there, leaving out those that were done before they left."""
    gone: list[RoundHost] = []
    dead: dict[str, str] = {}
    for part in round_.hosts:
        if state.is_registered(part) or _is_done(state, round_, part):
            continue
        proof = state.proof_of_death(part)
        if proof:
            dead[part.host] = proof
        else:
            gone.append(part)
    return Absent(tuple(gone), dead)


def answer_deaths(now: float, state: ClusterState, round_: Round, dead: Mapping[str, str]) -> Decision:
    """Halt a round of which hosts are certainly dead."""
    began = min(state.gone_since(part) for part in round_.hosts if part.host in dead)
    incident = broken_incident(
        now, state, round_, IncidentKind.HOST_LOST, began, tuple(dead.values()), hosts=tuple(dead)
    )  # fmt: skip
    return break_round(now, round_, incident)


def answer_vanished(
    now: float, state: ClusterState, policy: Policy, round_: Round, gone: tuple[RoundHost, ...]
) -> Decision:
    """Hosts are not registered, and nothing proves them dead: evict on a second sign, else hold or wait."""
    names = tuple(part.host for part in gone)
    began = min(state.gone_since(part) for part in gone)
    probes = probes_for(now, state, gone)
    sign = _second_sign(now, state, policy, round_, gone, began)
    if sign:
        evidence = (*(f"{name} is lost; its lease is gone" for name in names[:8]), *sign)
        # a host that is cut off stops the others' steps long before its lease is over
        began = min((began, *(stall_began(state, host, now) for host in stalled_hosts(state, round_))))
        incident = broken_incident(now, state, round_, IncidentKind.HOST_LOST, began, evidence, hosts=names)
        return break_round(now, round_, incident)
    if now - began < _TOLERATED_S:
        return Decision(probes, f"{', '.join(names[:8])}: lease gone a moment ago")
    if _are_too_many(policy, round_, gone):
        return _hold(now, state, round_, names, began, probes, "so many leases at once are etcd's or its network's")
    if _advanced_at(state, round_, gone, began) > began + _TOLERATED_S or all(_is_alive(state, part) for part in gone):
        return _hold(now, state, round_, names, began, probes, "training goes on without their leases")
    return Decision(probes, f"{', '.join(names[:8])}: lease gone; waiting for a second sign before anybody is evicted")


def _second_sign(
    now: float, state: ClusterState, policy: Policy, round_: Round, gone: tuple[RoundHost, ...], began: float
) -> tuple[str, ...]:
    """Return what says, beside the lease, that the hosts are lost; nothing where they may well train."""
    stalled = stalled_hosts(state, round_)
    if stalled:
        return tuple(stall_words(state, host) for host in stalled[:4])
    waited_s = now - began
    others = _others(round_, gone)
    if not others:
        until = max(gone_by(state, policy, round_, part, state.gone_since(part)) for part in gone)
        return (f"no host of the round is reachable for {waited_s:.0f} s",) if now > until else ()
    saved = [part.host for part in others if _exit_code_of(state, round_, part) == ExitCode.SAVED_AND_STOPPED]
    if saved:
        # all ranks agree on such a stop, and no known host or person has asked for it
        return (f"{', '.join(saved[:8])}: the workers were asked to save and stop, and did",)
    if _are_too_many(policy, round_, gone) or all(_is_alive(state, part) for part in gone):
        # who is done with its work complains of nothing any more
        is_waiting = all(_is_done(state, round_, part) for part in others)
        until = max(gone_by(state, policy, round_, part, state.gone_since(part)) for part in gone)
        is_over = is_waiting and now > until
        return (f"all others are done and wait for {waited_s:.0f} s",) if is_over else ()
    # statuses come at intervals: steps may go on for so long unheard
    limit_s = policy.status_interval_s + max(policy.hang_floor_s, _SLOW_STEPS * (median_step_s(state, round_) or 0.0))
    silent_s = now - _advanced_at(state, round_, gone, began)
    return (f"no step was completed for {silent_s:.1f} s (limit {limit_s:.1f} s)",) if silent_s > limit_s else ()


def _are_too_many(policy: Policy, round_: Round, gone: tuple[RoundHost, ...]) -> bool:
    most = policy.max_vanished_fraction * len(round_.hosts)
    return len(round_.hosts) >= _LEAST_HOSTS and len(gone) >= _MANY and len(gone) > most


def _advanced_at(state: ClusterState, round_: Round, gone: tuple[RoundHost, ...], began: float) -> float:
    """Return when one of the hosts that are left was last seen to complete a step."""
    return max((state.advanced_at.get(part.host, began) for part in _others(round_, gone)), default=began)


def _others(round_: Round, gone: tuple[RoundHost, ...]) -> list[RoundHost]:
    names = {part.host for part in gone}
    return [part for part in round_.hosts if part.host not in names]


def _is_done(state: ClusterState, round_: Round, part: RoundHost) -> bool:
    status = state.status_of(part, round_.number)
    return status is not None and status.phase is HostPhase.DONE


def _exit_code_of(state: ClusterState, round_: Round, part: RoundHost) -> int | None:
    status = state.status_of(part, round_.number)
    return None if status is None or status.phase is not HostPhase.DONE else status.exit_code


def _is_alive(state: ClusterState, part: RoundHost) -> bool:
    found = state.probes.get(part.host)
    return found is not None and found.session == part.session and found.vitality is Vitality.ALIVE


def _hold(
    now: float,
    state: ClusterState,
    round_: Round,
    names: tuple[str, ...],
    began: float,
    probes: tuple[Action, ...],
    why: str,
) -> Decision:
    gone = f"{_part_of(names, round_)} {'is' if len(names) == 1 else 'are'} not registered"
    reason = f"held: {gone} ({', '.join(names[:8])}), but {why}"
    actions: tuple[Action, ...] = (*probes, Alarm("control-plane", reason))
    if open_hold(state, round_) is None and len(_holds(state, round_)) < _MAX_HOLDS:
        incident = new_incident(
            now, state, IncidentKind.CONTROL_PLANE, round_=round_, began=began, reason=reason, action=HOLD
        )  # fmt: skip
        evidence = tuple(f"{name} is lost; its lease is gone" for name in names[:12])
        held = replace(incident, state=IncidentState.HELD, culprit_hosts=names[:32], evidence=evidence)
        actions = (OpenIncident(held), *actions)
    return Decision(actions, reason)


def _part_of(names: tuple[str, ...], round_: Round) -> str:
    return f"{len(names)} of {count_text(len(round_.hosts), 'host')}"


def hold_of_returned(now: float, state: ClusterState, round_: Round) -> tuple[OpenIncident, ...]:
    """Return an incident for leases that were lost and regained while no driver could open one: every loss is
    recorded."""
    names = _returned(state, round_)
    if not names or len(_holds(state, round_)) >= _MAX_HOLDS:
        return ()
    lost = f"{_part_of(names, round_)} lost {'its lease' if len(names) == 1 else 'their leases'}"
    reason = f"held: {lost} ({', '.join(names[:8])}) and registered again; training went on"
    incident = new_incident(
        now, state, IncidentKind.CONTROL_PLANE, round_=round_, began=now, reason=reason, action=HOLD
    )  # fmt: skip
    evidence = tuple(f"{name} is registered anew with the session of before" for name in names[:12])
    return (
        OpenIncident(
            replace(
                incident,
                state=IncidentState.HELD,
                culprit_hosts=names[:32],
                evidence=evidence,
                notes={**incident.notes, OVER_NOTE: f"{now:.3f}"},
            )
        ),
    )


def _returned(state: ClusterState, round_: Round) -> tuple[str, ...]:
    """Return the hosts whose key is younger than their round, and than the last word of any hold of it."""
    keys = state.keys
    written = state.seen.get(keys.round(round_.number))
    if written is None:
        return ()
    holds = (
        state.seen[key].mod_revision
        for one in _holds(state, round_)
        if (key := keys.incident(one.incident_id)) in state.seen
    )
    told = max((written.create_revision, *holds))
    return tuple(
        part.host
        for part in round_.hosts
        if state.is_registered(part)
        and (seen := state.seen.get(keys.host(part.host))) is not None
        and seen.create_revision > told
    )


def open_hold(state: ClusterState, round_: Round) -> Incident | None:
    """Return the hold of this round that is not over."""
    return next((incident for incident in _holds(state, round_) if OVER_NOTE not in incident.notes), None)


def _holds(state: ClusterState, round_: Round) -> list[Incident]:
    kind, number = IncidentKind.CONTROL_PLANE, round_.number
    return [incident for incident in state.incidents.values() if incident.kind is kind and incident.round == number]
