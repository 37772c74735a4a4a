"""Makes the documents of /incidents and /verdicts: the failure, the response, and the cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from megatrain.contracts.exit_codes import exit_text
from megatrain.contracts.records.host_records import RankFailure
from megatrain.contracts.records.host_verdict import OutcomeKind
from megatrain.contracts.records.incident import Incident, IncidentState, phase_begins, phase_seconds
from megatrain_dashboard.api.incidents.document import (
    DamagedIncidentDocument,
    FailureDocument,
    IncidentDocument,
    IncidentsDocument,
    PhaseDocument,
    VerdictDocument,
)
from megatrain_dashboard.sources.hosts import HostOf
from megatrain_dashboard.sources.window import Window
from megatrain_job.failures.culprit import FailureRole, failures_by_role
from megatrain_job.jobs.incident_phrases import KIND_TEXTS, down_s
from megatrain_job.jobs.verdict_cases import VerdictWithOutcome

_MAX_SHOWN = 1000
"""The greatest number of incidents, and of verdicts, in one response; the newest are kept."""


def incidents_within(incidents: Iterable[Incident], window: Window) -> tuple[Incident, ...]:
    """Return the incidents that overlap a part of the run; an open incident lasts until now."""
    return tuple(incident for incident in incidents if window.holds(incident.moments.began, _ended_s(incident)))


def cases_within(cases: Iterable[VerdictWithOutcome], window: Window) -> tuple[VerdictWithOutcome, ...]:
    """Return the verdicts that overlap a part of the run; a verdict that waits for a person lasts until now."""
    return tuple(case for case in cases if window.holds(*_lasted(case)))


def _ended_s(incident: Incident) -> float:
    if incident.state is IncidentState.OPEN:
        return math.inf
    return incident.moments.first_step or incident.moments.detected


def _lasted(case: VerdictWithOutcome) -> tuple[float | None, float | None]:
    verdict, outcome = case.verdict, case.outcome
    at_s = None if outcome is None else outcome.at_unix_s
    began_s = at_s if verdict is None else verdict.created_unix_s
    is_waiting = outcome is None or outcome.kind is OutcomeKind.WAITING
    return began_s, math.inf if is_waiting else at_s


def incidents_document(
    incidents: Iterable[Incident], cases: Iterable[VerdictWithOutcome], damaged: Mapping[str, str], host_of: HostOf
) -> IncidentsDocument:
    """Return the newest thousand of each kind, newest first. `damaged`: by id, why a record cannot be read."""
    newest = sorted(incidents, key=lambda incident: incident.incident_id, reverse=True)[:_MAX_SHOWN]
    newest_cases = sorted(cases, key=lambda case: case.verdict_id, reverse=True)[:_MAX_SHOWN]
    return IncidentsDocument(
        incidents=tuple(incident_document(incident, host_of) for incident in newest),
        verdicts=tuple(verdict_document(case) for case in newest_cases),
        damaged=tuple(
            DamagedIncidentDocument(incident_id=name, text=damaged[name])
            for name in sorted(damaged, reverse=True)[:_MAX_SHOWN]
        ),
    )


def incident_document(incident: Incident, host_of: HostOf) -> IncidentDocument:
    """Return the document of an incident. Its failures begin with the root causes; each phase has its start."""
    hosts = {failure.rank: host_of(incident.round, failure.rank) for failure in incident.failures}
    failures = failures_by_role(incident, hosts)
    return IncidentDocument.of(
        incident,
        kind_text=KIND_TEXTS[incident.kind],
        began_unix_s=incident.moments.began,
        detected_unix_s=incident.moments.detected,
        hosts=incident.culprit_hosts,
        ranks=incident.culprit_ranks,
        failures=tuple(_failure(failure, hosts[failure.rank], role) for role, failure in failures),
        phases=_phases(incident),
        down_s=down_s(incident),
        verdict_id=incident.verdict,
    )


def _phases(incident: Incident) -> tuple[PhaseDocument, ...]:
    seconds = phase_seconds(incident.moments)
    return tuple(
        PhaseDocument(name=name, began_unix_s=begin, seconds=seconds[name])
        for name, begin in phase_begins(incident.moments).items()
    )


def _failure(failure: RankFailure, host: str, role: FailureRole) -> FailureDocument:
    is_cascade = role is FailureRole.FOLLOWS
    return FailureDocument.of(failure, host=host, exit_text=exit_text(failure.exit_code), is_cascade=is_cascade)


def verdict_document(case: VerdictWithOutcome) -> VerdictDocument:
    """Return a verdict and its outcome; the fields of a missing part are empty."""
    verdict, outcome = case.verdict, case.outcome
    return VerdictDocument(
        verdict_id=case.verdict_id,
        kind="" if verdict is None else str(verdict.kind),
        cause="" if verdict is None else str(verdict.cause),
        confidence="" if verdict is None else str(verdict.confidence),
        round=0 if verdict is None else verdict.round,
        created_unix_s=(0.0 if outcome is None else outcome.at_unix_s) if verdict is None else verdict.created_unix_s,
        hosts=() if verdict is None else verdict.hosts,
        ranks=() if verdict is None else verdict.ranks,
        evidence=() if verdict is None else verdict.evidence,
        first_step=None if verdict is None else verdict.first_step,
        last_step=None if verdict is None else verdict.last_step,
        step_s=None if verdict is None else verdict.step_s,
        gain_s_per_step=0.0 if verdict is None else verdict.gain_s_per_step,
        outcome="" if outcome is None else str(outcome.kind),
        outcome_reason="" if outcome is None else outcome.reason,
        outcome_by="" if outcome is None else outcome.by,
        outcome_unix_s=None if outcome is None else outcome.at_unix_s,
        gain_s=0.0 if outcome is None else outcome.gain_s,
        cost_s=0.0 if outcome is None else outcome.cost_s,
        incident_id="" if outcome is None else outcome.incident,
    )
