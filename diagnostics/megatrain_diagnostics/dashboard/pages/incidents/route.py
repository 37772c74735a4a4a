"""GET /incidents, /incidents/{id} and /verdicts/{id}."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from megatrain_diagnostics.dashboard.answers.answer import cached_answer, document_answer, document_bytes
from megatrain_diagnostics.dashboard.answers.errors import not_found, shown
from megatrain_diagnostics.dashboard.answers.questions import From, To
from megatrain_diagnostics.dashboard.pages.incidents.document import (
    IncidentDocument,
    IncidentsDocument,
    VerdictDocument,
)
from megatrain_diagnostics.dashboard.pages.incidents.view import (
    cases_within,
    incident_document,
    incidents_document,
    incidents_within,
    verdict_document,
)
from megatrain_diagnostics.dashboard.parts import Parts
from megatrain_diagnostics.dashboard.sources.host_names import host_names

Id = Annotated[str, Path(max_length=256)]
_MOST_NAMED = 8


def router(parts: Parts) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(tags=["incidents"])
    source = parts.source

    @routes.get("/incidents", response_model=IncidentsDocument)
    def incidents(request: Request, begin: From = "", end: To = "") -> Response:
        """Return incidents of all launches and verdicts of a part of the run, the newest first."""
        window = parts.window(begin, end)

        def make() -> bytes:
            facts = source.facts()
            shown = incidents_within(facts.incidents, window)
            cases = cases_within(facts.cases, window)
            return document_bytes(incidents_document(shown, cases, host_names(source, shown)))

        version = source.live().versions["incidents"]
        return cached_answer(request, parts.answers.get(("incidents", version, window), make))

    @routes.get("/incidents/{incident_id}", response_model=IncidentDocument)
    def incident(incident_id: Id) -> Response:
        """Return one incident."""
        found = {one.incident_id: one for one in source.facts().incidents}
        if incident_id not in found:
            raise not_found(f"incident {shown(incident_id)}: {_there('incident', sorted(found, reverse=True))}")
        one = found[incident_id]
        return document_answer(incident_document(one, host_names(source, (one,))))

    @routes.get("/verdicts/{verdict_id}", response_model=VerdictDocument)
    def verdict(verdict_id: Id) -> Response:
        """Return one verdict and what became of it."""
        found = {one.verdict_id: one for one in source.facts().cases}
        if verdict_id not in found:
            raise not_found(f"verdict {shown(verdict_id)}: {_there('verdict', sorted(found, reverse=True))}")
        return document_answer(verdict_document(found[verdict_id]))

    return routes


def _there(what: str, ids: list[str]) -> str:
    if not ids:
        return f"there is no {what} at all"
    more = f" and {len(ids) - _MOST_NAMED} older ones" if len(ids) > _MOST_NAMED else ""
    return f"no such {what}; there are {', '.join(ids[:_MOST_NAMED])}{more}"
