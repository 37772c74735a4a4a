"""GET /marks: events of a run as marks on its charts."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from megatrain_dashboard.api.marks.document import MarksDocument
from megatrain_dashboard.api.marks.view import marks_document
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import cached_response, document_bytes
from megatrain_dashboard.responses.query_parameters import From, To

_TOPICS = ("incidents", "checkpoints", "overview")


def router(parts: DashboardParts) -> APIRouter:
    """Return the route that answers with the marks of the charts: incidents, notes, checkpoints, rounds and others."""
    routes = APIRouter(tags=["overview"])

    @routes.get("/marks", response_model=MarksDocument)
    def marks(request: Request, begin: From = "", end: To = "") -> Response:
        """Return incidents, notes, configuration changes, checkpoints, new rounds, and steps with non-finite numbers.

        If there are more than 200 of a kind, neighbours become one mark with their count.
        """
        window = parts.window(begin, end)
        versions = parts.source.live().versions
        key = ("marks", *(versions[topic] for topic in _TOPICS), window)
        response = parts.responses.get(key, lambda: document_bytes(marks_document(parts.source.facts(), window)))
        return cached_response(request, response)

    return routes
