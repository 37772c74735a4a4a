"""The response to a live round without progress: collect evidence, find the culprit, halt.

Pure functions: no I/O and no clock.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.contracts.records.host_records import HangEvidence
from megatrain.contracts.records.incident import IncidentKind
from megatrain.contracts.records.rounds import HostCommand, Round
from megatrain.formatting import names_text
from megatrain_launcher.driver.actions import Decision, SendCommand
from megatrain_launcher.driver.breaking import break_round, broken_incident, probes_for, stall_began, stall_sentence
from megatrain_launcher.driver.hangs import CulpritFinding, find_culprit
from megatrain_launcher.driver.policy import EVIDENCE_S, HANG_GRACE_S, Policy
from megatrain_launcher.driver.state import ClusterState

_ASK_AGAIN_S = 5.0


def respond_to_stall(
    now: float, state: ClusterState, policy: Policy, round_: Round, stalled: tuple[str, ...]
) -> Decision:
    """Return the response to a round whose hosts report a stall."""
    since = min(state.stalled_since.get(host, now) for host in stalled)
    evidence = _fresh_evidence(state, round_, since)
    without_evidence = tuple(part for part in round_.hosts if part.host not in evidence)
    actions = probes_for(now, state, without_evidence)
    if not _has_asked(state, round_, since, now):
        actions = (_evidence_command(state, round_), *actions)
    if without_evidence and now - since < EVIDENCE_S:
        return Decision(actions, f"no progress on {names_text(stalled)}: waiting for evidence")
    found = find_culprit(round_, evidence, (stall_sentence(state, host) for host in stalled[:4]))
    if found.waits_for_storage:
        # the wait has a time limit of its own, after which the rank fails and names the reason. For a snapshot it is
        # runtime.checkpoint_timeout_s; for data, the limit of a read from object storage or of a request to a producer
        return Decision(actions, f"no progress on {names_text(stalled)}: {found.waits_for_storage}")
    silent = {part.host for part in without_evidence}
    if found.hosts and silent.issuperset(found.hosts):
        dead = {part.host: proof for part in without_evidence if (proof := state.proof_of_death(part))}
        if now - since < policy.lease_ttl_s + HANG_GRACE_S and not dead:
            expiry = "the lease expires" if len(found.hosts) == 1 else "their leases expire"
            return Decision(
                actions, f"no progress, and {', '.join(found.hosts)} cannot be reached: waiting until {expiry}"
            )
        found = replace(found, sentences=(*dead.values(), *found.sentences))
    began = min(stall_began(state, host, now) for host in stalled)
    return _halt_hang(now, state, round_, found, began=began, detected=since)


def _halt_hang(
    now: float, state: ClusterState, round_: Round, found: CulpritFinding, *, began: float, detected: float
) -> Decision:
    hosts, ranks = (found.hosts, found.ranks) if found.is_firm else ((), ())
    incident = broken_incident(now, state, round_, IncidentKind.HANG, began, found.sentences, hosts=hosts)
    moments = replace(incident.moments, detected=max(detected, incident.moments.began))
    incident = replace(incident, culprit_ranks=ranks, confidence=found.confidence, label="hang", moments=moments)
    return break_round(now, round_, incident)


def _fresh_evidence(state: ClusterState, round_: Round, since: float) -> dict[str, HangEvidence]:
    """Return the evidence of this stall by host; it may arrive a moment before the status that reports the stall."""
    seen = {host: state.seen.get(state.keys.evidence(round_.number, host)) for host in state.evidence_of(round_)}
    return {
        host: evidence
        for host, evidence in state.evidence_of(round_).items()
        if (at := seen[host]) is not None and at.changed >= since - EVIDENCE_S
    }


def _has_asked(state: ClusterState, round_: Round, since: float, now: float) -> bool:
    """Return whether evidence of this stall was requested recently; older evidence may be outdated."""
    since = max(since, now - _ASK_AGAIN_S)
    return any(
        command.kind == "evidence"
        and command.request == f"round-{round_.number}"
        and state.since(state.keys.command(command.number), since) >= since
        for command in state.commands.values()
    )


def _evidence_command(state: ClusterState, round_: Round) -> SendCommand:
    hosts = tuple(part.host for part in round_.hosts)
    request = f"round-{round_.number}"
    return SendCommand(HostCommand(state.next_command, "evidence", hosts, request))
