"""The actions on a verdict: an incident, a halt, and cordons or a rollback. Pure functions: no I/O and no clock."""

from __future__ import annotations

from dataclasses import replace

from megatrain.contracts.records.host_verdict import HostVerdict, VerdictKind
from megatrain.contracts.records.incident import Incident, IncidentKind
from megatrain.contracts.records.job_requests import JobRequest
from megatrain.contracts.records.rounds import Cordon, Rollback, Round
from megatrain_job.failures.verdict import Label
from megatrain_launcher.driver.actions import CordonHost, DriverAction, DropKey, OpenIncident, UpdateIncident
from megatrain_launcher.driver.breaking import halt
from megatrain_launcher.driver.eligibility import eligible
from megatrain_launcher.driver.incidents import HOSTS_NOTE, REQUEST_NOTE, new_incident
from megatrain_launcher.driver.outcome_rules import Judgment, incident_of_hang
from megatrain_launcher.driver.policy import GROW_AFTER_S, Policy
from megatrain_launcher.driver.response import EVICT, ROLLBACK, STOP
from megatrain_launcher.driver.state import ClusterState

_MAX_SENTENCES = 16
_MAX_SENTENCE = 300


def actions_on(
    now: float, state: ClusterState, policy: Policy, verdict: HostVerdict, judged: Judgment, request: JobRequest | None
) -> tuple[str, tuple[DriverAction, ...]]:
    """Return the id of the new incident and the actions. Workers may save first, unless the verdict is on numerics."""
    round_ = state.round
    assert round_ is not None
    incident = _incident(now, state, round_, verdict, judged, request)
    is_saving = verdict.kind is VerdictKind.STRAGGLER
    cordons = (
        CordonHost(Cordon(host, judged.reason, _who(request), now, incident.incident_id)) for host in judged.hosts
    )
    halted = halt(now, round_, incident.reason, is_saving=is_saving, incident=incident.incident_id)
    return incident.incident_id, (OpenIncident(incident), halted, *cordons)


def _incident(
    now: float, state: ClusterState, round_: Round, verdict: HostVerdict, judged: Judgment, request: JobRequest | None
) -> Incident:
    is_straggler = verdict.kind is VerdictKind.STRAGGLER
    kind = IncidentKind.STRAGGLER if is_straggler else IncidentKind.NUMERICS
    action = EVICT if is_straggler else STOP if judged.is_stopping else ROLLBACK
    incident = new_incident(now, state, kind, round_=round_, began=now, reason=judged.reason, action=action)
    rollback = None
    if action == ROLLBACK:
        steps = (verdict.rollback_to, verdict.skip_from, verdict.skip_to)
        rollback = Rollback(incident.incident_id, *(step for step in steps if step is not None))
    notes = {} if request is None else {REQUEST_NOTE: request.request_id}
    if is_straggler:
        notes[HOSTS_NOTE] = str(judged.num_after)
    return replace(
        incident,
        culprit_hosts=judged.hosts,
        culprit_ranks=tuple(rank for rank in verdict.ranks if 0 <= rank < round_.world_size),
        confidence=str(verdict.confidence),
        evidence=_sentences(verdict),
        label=str(verdict.cause) if is_straggler else str(Label.NUMERICS),
        verdict=verdict.verdict_id,
        rollback=rollback,
        notes={**incident.notes, **notes},
    )


def _who(request: JobRequest | None) -> str:
    return "driver" if request is None else request.by


def _sentences(verdict: HostVerdict) -> tuple[str, ...]:
    return tuple(sentence[:_MAX_SENTENCE] for sentence in verdict.evidence[:_MAX_SENTENCES])


def cordon_removals(
    now: float, state: ClusterState, policy: Policy, round_: Round, incident: Incident, since: float
) -> tuple[DropKey, ...]:
    """Return removals of an eviction's cordons if too few hosts are left: a slow host is better than a slower job.

    `since`: when the round was halted.
    """
    wanted = incident.notes.get(HOSTS_NOTE, "")
    if incident.kind is not IncidentKind.STRAGGLER or not wanted.isdigit() or now - since < GROW_AFTER_S:
        return ()
    own = {host: cordon for host, cordon in state.cordons.items() if cordon.incident == incident.incident_id}
    if not own or policy.slots(len(eligible(now, state, policy, round_).available)) <= policy.slots(int(wanted)):
        return ()
    keys = (state.keys.cordon(host) for host in own)
    return tuple(DropKey(key, state.seen[key].mod_revision) for key in keys if key in state.seen)


def keep_as_evidence(state: ClusterState, verdict: HostVerdict) -> tuple[str, tuple[DriverAction, ...]]:
    """Return the id of the hang's incident, and the action that adds the verdict's evidence to it."""
    incident = incident_of_hang(state, verdict)
    assert incident is not None
    evidence = tuple(dict.fromkeys((*incident.evidence, *_sentences(verdict))))[: 2 * _MAX_SENTENCES]
    update = replace(incident, evidence=evidence, verdict=verdict.verdict_id)
    return incident.incident_id, (UpdateIncident(update),)
