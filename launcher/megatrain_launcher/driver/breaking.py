"""Halts of broken rounds, their incidents, and the sentences on stalls. Pure functions: no I/O and no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatrain.contracts.records.host_records import RankFailure
from megatrain.contracts.records.incident import Incident, IncidentKind
from megatrain.contracts.records.rounds import Halt, Round, RoundHost
from megatrain_job.failures.culprit import is_victim
from megatrain_job.jobs.host_view import stall_text
from megatrain_launcher.driver.actions import Decision, DriverAction, HaltRound, OpenIncident, Probe
from megatrain_launcher.driver.folding import plausible_time
from megatrain_launcher.driver.incidents import new_incident, statuses_in
from megatrain_launcher.driver.policy import PROBE_AGAIN_S
from megatrain_launcher.driver.response import RESTART
from megatrain_launcher.driver.state import ClusterState

_MAX_FAILURES = 32


def broken_incident(
    now: float,
    state: ClusterState,
    round_: Round,
    kind: IncidentKind,
    began: float,
    evidence: tuple[str, ...],
    *,
    hosts: tuple[str, ...] = (),
    failures: tuple[RankFailure, ...] = (),
) -> Incident:
    """Return the incident of a broken round. The response is chosen later, once the round's workers are gone."""
    reason = f"round {round_.number} is broken: {evidence[0] if evidence else kind}"
    incident = new_incident(now, state, kind, round_=round_, began=began, reason=reason, action=RESTART)
    return replace(incident, culprit_hosts=hosts, evidence=evidence, failures=most_informative(failures))


def most_informative(failures: Iterable[RankFailure]) -> tuple[RankFailure, ...]:
    """Return the failures to keep in an incident, earliest first; victims are the first to be dropped."""
    ordered = sorted(failures, key=lambda failure: (is_victim(failure), failure.at_unix_s, failure.rank))
    return tuple(sorted(ordered[:_MAX_FAILURES], key=lambda failure: (failure.at_unix_s, failure.rank)))


def break_round(now: float, round_: Round, incident: Incident) -> Decision:
    """Open the incident and halt the round with it."""
    halted = halt(now, round_, incident.reason, incident=incident.incident_id)
    return Decision((OpenIncident(incident), halted), incident.reason)


def halt(now: float, round_: Round, reason: str, *, is_saving: bool = False, incident: str = "") -> HaltRound:
    return HaltRound(Halt(round_.number, reason, is_saving, now, incident))


def probes_for(now: float, state: ClusterState, parts: Iterable[RoundHost]) -> tuple[DriverAction, ...]:
    """Return probes of those hosts that were not probed recently."""
    probes: list[DriverAction] = []
    for part in parts:
        found = state.probes.get(part.host)
        is_fresh = found is not None and found.session == part.session and now - found.at < PROBE_AGAIN_S
        if part.liveness_port and not is_fresh:
            probes.append(Probe(part.host, part.session, part.address, part.liveness_port))
    return tuple(probes)


def stalled_hosts(state: ClusterState, round_: Round) -> tuple[str, ...]:
    """Return the hosts of a round that report a stall."""
    return tuple(status.host for status in statuses_in(state, round_) if status.stall is not None)


def stall_sentence(state: ClusterState, host: str) -> str:
    """Return a sentence that describes a host's stall."""
    stall = state.statuses[host].stall
    assert stall is not None
    return f"{host}: {stall_text(stall)}"


def stall_began(state: ClusterState, host: str, now: float) -> float:
    """Return when a stalled host's ranks last made progress; `now` if the host reports no stall."""
    stall = state.statuses[host].stall
    if stall is None:
        return now
    return plausible_time(stall.at_unix_s, state.stalled_since.get(host, now), now) - stall.silent_s
