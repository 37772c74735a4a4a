"""Hosts of a live round that are not registered: dead, cut off, or only without a lease (ADR 0036).

Pure functions: no I/O and no clock. As long as steps are completed, a lost lease does not show that a host is lost. A
host is proven dead if its liveness port refuses connections, or if its executor runs with another session. Without
proof, a second sign is required besides the lease: a stall, a failure, or no completed step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.incident import OVER_NOTE, Incident, IncidentKind, IncidentState
from megatrain.contracts.records.rounds import Round, RoundHost
from megatrain.formatting import count_text, names_text
from megatrain_launcher.driver.actions import Alarm, Decision, DriverAction, OpenIncident
from megatrain_launcher.driver.breaking import (
    break_round,
    broken_incident,
    probes_for,
    stall_began,
    stall_sentence,
    stalled_hosts,
)
from megatrain_launcher.driver.fences import workers_gone_at
from megatrain_launcher.driver.incidents import median_step_s, new_incident
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.response import HOLD
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.liveness import Liveness

_SLOW_STEPS = 3
"""A host without a lease is evicted if no step is completed for this many times the median step time."""
_TOLERATED_S = 1.0
"""Without a second sign, no incident is opened in this time after a lease is gone: after an outage of etcd, hosts
register again one after the other."""
_MIN_HOSTS = 3
"""In a smaller round, the fraction of lost leases does not show whether etcd is the cause."""
_MANY = 2
"""If fewer hosts than this are missing, etcd does not count as the cause."""
_MAX_HOLDS = 20
"""The most holds of a round that become incidents; later ones only raise alarms, because a lease may flap for days."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Hosts of a round that are not registered: `gone` without proof of death, `dead` by name with the proof."""

    gone: tuple[RoundHost, ...]
    dead: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _SecondEvidence:
    """Evidence, besides the lost leases, that hosts are lost.

    `began`: when the steps stopped according to this evidence; a host that is cut off stops the steps of all hosts long
    before its lease ends.
    """

    evidence: tuple[str, ...]
    began: float


def absent_of(state: ClusterState, round_: Round) -> Absent:
    """Return the hosts of a round that are not registered, except those that have finished their work."""
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


def respond_to_deaths(now: float, state: ClusterState, round_: Round, dead: Mapping[str, str]) -> Decision:
    """Halt a round with hosts that are proven dead."""
    began = min(state.gone_since(part) for part in round_.hosts if part.host in dead)
    incident = broken_incident(
        now, state, round_, IncidentKind.HOST_LOST, began, tuple(dead.values()), hosts=tuple(dead)
    )  # fmt: skip
    return break_round(now, round_, incident)


def respond_to_vanished(
    now: float, state: ClusterState, policy: Policy, round_: Round, gone: tuple[RoundHost, ...]
) -> Decision:
    """Respond to unregistered hosts without a proof of death: evict on a second sign, else hold or wait."""
    names = tuple(part.host for part in gone)
    lease = "the lease" if len(names) == 1 else "their leases"
    began = min(state.gone_since(part) for part in gone)
    probes = probes_for(now, state, gone)
    second = _second_evidence(now, state, policy, round_, gone, began)
    if second is not None:
        evidence = (*(f"{name} is lost; its lease is gone" for name in names[:8]), *second.evidence)
        incident = broken_incident(
            now, state, round_, IncidentKind.HOST_LOST, min(began, second.began), evidence, hosts=names
        )
        return break_round(now, round_, incident)
    if now - began < _TOLERATED_S:
        return Decision(probes, f"{names_text(names)}: {lease} ended a moment ago")
    if _are_too_many(policy, round_, gone):
        return _hold(
            now,
            state,
            round_,
            names,
            began,
            probes,
            "the loss of this many leases at once points to etcd or its network",
        )
    # a status that arrives now may report a step that was completed one interval ago
    if _advanced_at(state, round_, gone, began) > began + max(_TOLERATED_S, policy.status_interval_s):
        return _hold(now, state, round_, names, began, probes, "training continues without their leases")
    # a frozen host still accepts connections: an answer counts only once a stall would have been reported
    if all(_is_alive(state, part) for part in gone) and now - began > _silence_limit_s(state, policy, round_):
        return _hold(now, state, round_, names, began, probes, "they answer probes, and no host reports a stall")
    return Decision(probes, f"{names_text(names)}: {lease} ended; a host is evicted only after a second sign")


def _second_evidence(
    now: float, state: ClusterState, policy: Policy, round_: Round, gone: tuple[RoundHost, ...], began: float
) -> _SecondEvidence | None:
    """Return evidence besides the leases that the hosts are lost; None if they may still train."""
    stalled = stalled_hosts(state, round_)
    if stalled:
        since = min(stall_began(state, host, now) for host in stalled)
        return _SecondEvidence(tuple(stall_sentence(state, host) for host in stalled[:4]), since)
    waited_s = now - began
    others = _others(round_, gone)
    if not others:
        until = max(workers_gone_at(state, policy, round_, part, state.gone_since(part)) for part in gone)
        text = f"no host of the round has been reachable for {waited_s:.0f} s"
        return _SecondEvidence((text,), began) if now > until else None
    saved = [part.host for part in others if _exit_code_of(state, round_, part) == ExitCode.SAVED_AND_STOPPED]
    if saved:
        # all ranks agreed to save and stop, but no registered host or person requested it: a missing host may have
        # requested it
        return _SecondEvidence((f"{names_text(saved)}: the workers were asked to save and stop, and did so",), began)
    if _are_too_many(policy, round_, gone) or all(_is_alive(state, part) for part in gone):
        # a host that has finished its work no longer reports stalls
        is_waiting = all(_is_done(state, round_, part) for part in others)
        until = max(workers_gone_at(state, policy, round_, part, state.gone_since(part)) for part in gone)
        is_over = is_waiting and now > until
        text = f"all other hosts are done and have waited for {waited_s:.0f} s"
        return _SecondEvidence((text,), began) if is_over else None
    limit_s = _silence_limit_s(state, policy, round_)
    advanced_at = _advanced_at(state, round_, gone, began)
    silent_s = now - advanced_at
    if silent_s <= limit_s:
        return None
    return _SecondEvidence((f"no step was completed for {silent_s:.1f} s (limit {limit_s:.1f} s)",), advanced_at)


def _silence_limit_s(state: ClusterState, policy: Policy, round_: Round) -> float:
    """Return for how many seconds reports of completed steps may be missing while training continues."""
    return policy.status_interval_s + max(policy.hang_floor_s, _SLOW_STEPS * (median_step_s(state, round_) or 0.0))


def _are_too_many(policy: Policy, round_: Round, gone: tuple[RoundHost, ...]) -> bool:
    most = policy.max_vanished_fraction * len(round_.hosts)
    return len(round_.hosts) >= _MIN_HOSTS and len(gone) >= _MANY and len(gone) > most


def _advanced_at(state: ClusterState, round_: Round, gone: tuple[RoundHost, ...], began: float) -> float:
    """Return when one of the remaining hosts was last seen to complete a step."""
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
    return found is not None and found.session == part.session and found.liveness is Liveness.ALIVE


def _hold(
    now: float,
    state: ClusterState,
    round_: Round,
    names: tuple[str, ...],
    began: float,
    probes: tuple[DriverAction, ...],
    why: str,
) -> Decision:
    gone = f"{_part_of(names, round_)} {'is' if len(names) == 1 else 'are'} not registered"
    reason = f"held: {gone} ({names_text(names)}), but {why}"
    actions: tuple[DriverAction, ...] = (*probes, Alarm("control-plane", reason))
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
    """Return the incident of leases that were lost and regained without a recorded hold, so that each loss is recorded.

    No hold is recorded while no driver leads, or if the lease is regained before the driver decides to hold.
    """
    names = _returned(state, round_)
    if not names or len(_holds(state, round_)) >= _MAX_HOLDS:
        return ()
    lost = f"{_part_of(names, round_)} lost {'its lease' if len(names) == 1 else 'their leases'}"
    reason = f"held: {lost} ({names_text(names)}) and registered again; training continued"
    incident = new_incident(
        now, state, IncidentKind.CONTROL_PLANE, round_=round_, began=now, reason=reason, action=HOLD
    )  # fmt: skip
    evidence = tuple(f"{name} is registered again with the same session" for name in names[:12])
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
    """Return the hosts that lost and regained their leases since the last hold of the round was recorded.

    Such a host's registration has a higher revision than the round and than all recorded holds of the round.
    """
    keys = state.keys
    written = state.seen.get(keys.round(round_.number))
    if written is None:
        return ()
    holds = (
        state.seen[key].mod_revision
        for hold in _holds(state, round_)
        if (key := keys.incident(hold.incident_id)) in state.seen
    )
    last_recorded = max((written.create_revision, *holds))
    return tuple(
        part.host
        for part in round_.hosts
        if state.is_registered(part)
        and (seen := state.seen.get(keys.host(part.host))) is not None
        and seen.create_revision > last_recorded
    )


def open_hold(state: ClusterState, round_: Round) -> Incident | None:
    """Return the incident of the round's current hold; None if there is none."""
    return next((incident for incident in _holds(state, round_) if OVER_NOTE not in incident.notes), None)


def _holds(state: ClusterState, round_: Round) -> list[Incident]:
    kind, number = IncidentKind.CONTROL_PLANE, round_.number
    return [incident for incident in state.incidents.values() if incident.kind is kind and incident.round == number]
