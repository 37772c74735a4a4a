"""GET /incidents, /incidents/{id} with its story and its logs, and /verdicts/{id}."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.record import encode
from megatrain.formatting import names_text
from megatrain_dashboard.api.incidents.document import (
    IncidentDocument,
    IncidentLogsDocument,
    IncidentsDocument,
    StoryDocument,
    VerdictDocument,
)
from megatrain_dashboard.api.incidents.log_view import LogPlaces, incident_logs
from megatrain_dashboard.api.incidents.story import story_document
from megatrain_dashboard.api.incidents.view import (
    cases_within,
    incident_document,
    incidents_document,
    incidents_within,
    verdict_document,
)
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import document_response
from megatrain_dashboard.responses.errors import not_found, shown
from megatrain_dashboard.responses.query_parameters import From, To
from megatrain_dashboard.sources.hosts import host_names, roster_if_known
from megatrain_dashboard.sources.protocol import JobSource

Id = Annotated[str, Path(max_length=256)]
_MAX_NAMED = 8
_FRESH_S = 3.0


def router(parts: DashboardParts) -> APIRouter:
    """Return the routes that answer with incidents and verdicts: all, or one with its story and its logs."""
    routes = APIRouter(tags=["incidents"])
    source = parts.source

    @routes.get("/incidents", response_model=IncidentsDocument)
    def incidents(request: Request, begin: From = "", end: To = "") -> Response:
        """Return incidents of all launches and verdicts of a part of the run, the newest first."""
        window = parts.window(begin, end)

        def make() -> IncidentsDocument:
            facts = source.facts()
            shown = incidents_within(facts.incidents, window)
            cases = cases_within(facts.cases, window)
            return incidents_document(shown, cases, facts.damaged_incidents, host_names(source, shown))

        return parts.responses.answer(request, ("incidents", source.live().versions["incidents"], window), make)

    @routes.get("/incidents/{incident_id}", response_model=IncidentDocument)
    def incident(incident_id: Id) -> Response:
        """Return one incident."""
        incident = _incident(source, incident_id)
        return document_response(incident_document(incident, host_names(source, (incident,))))

    @routes.get("/incidents/{incident_id}/story", response_model=StoryDocument)
    def story(incident_id: Id) -> Response:
        """Return what happened in order, who was notified, which actions are possible, and the runbooks."""
        incident, facts = _incident(source, incident_id), source.facts()
        case = next((case for case in facts.cases if incident.verdict and case.verdict_id == incident.verdict), None)
        hosts = host_names(source, (incident,))
        return document_response(story_document(incident, case, hosts, facts.config, source.snapshot(), parts.clock()))

    @routes.get("/incidents/{incident_id}/logs", response_model=IncidentLogsDocument, dependencies=[parts.heavy_query])
    def logs(request: Request, incident_id: Id) -> Response:
        """Return the last lines before the incident: the culprit's, then the others'."""
        incident = _incident(source, incident_id)

        def make() -> IncidentLogsDocument:
            hosts = host_names(source, (incident,))
            roster = roster_if_known(source, incident.round)
            places = LogPlaces(source.events, source.run, roster, partial(hosts, incident.round), parts.settings.limits)
            return incident_logs(incident, places, parts.clock())

        # an open incident has new lines each second, and all lines are classified again
        return parts.responses.answer(request, ("incident-logs", encode(incident)), make, fresh_s=_FRESH_S)

    @routes.get("/verdicts/{verdict_id}", response_model=VerdictDocument)
    def verdict(verdict_id: Id) -> Response:
        """Return one verdict and its outcome."""
        found = {case.verdict_id: case for case in source.facts().cases}
        if verdict_id not in found:
            raise not_found(f"verdict {shown(verdict_id)}: {_there('verdict', sorted(found, reverse=True))}")
        return document_response(verdict_document(found[verdict_id]))

    return routes


def _incident(source: JobSource, incident_id: str) -> Incident:
    facts = source.facts()
    found = {incident.incident_id: incident for incident in facts.incidents}
    if incident_id in facts.damaged_incidents:
        why = facts.damaged_incidents[incident_id]
        raise not_found(f"incident {shown(incident_id)}: its record is damaged, and there is no other source: {why}")
    if incident_id not in found:
        raise not_found(f"incident {shown(incident_id)}: {_there('incident', sorted(found, reverse=True))}")
    return found[incident_id]


def _there(what: str, ids: list[str]) -> str:
    if not ids:
        return f"there is no {what} yet"
    return f"no such {what}; there {'is' if len(ids) == 1 else 'are'} {names_text(ids, _MAX_NAMED)}"
