"""GET /marks: what happened to a run, for its charts."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from megatrain_diagnostics.dashboard.answers.answer import cached_answer, document_bytes
from megatrain_diagnostics.dashboard.answers.questions import From, To
from megatrain_diagnostics.dashboard.pages.marks.document import MarksDocument
from megatrain_diagnostics.dashboard.pages.marks.view import marks_document
from megatrain_diagnostics.dashboard.parts import Parts

_TOPICS = ("incidents", "checkpoints", "overview")


def router(parts: Parts) -> APIRouter:
    """Return the route."""
    routes = APIRouter(tags=["overview"])

    @routes.get("/marks", response_model=MarksDocument)
    def marks(request: Request, begin: From = "", end: To = "") -> Response:
        """Return incidents, notes, changes of the configuration, checkpoints, new rounds, and steps without a number.

        Of more than 200 of a kind those that lie side by side are one mark with their number.
        """
        window = parts.window(begin, end)
        versions = parts.source.live().versions
        key = ("marks", *(versions[topic] for topic in _TOPICS), window)
        answer = parts.answers.get(key, lambda: document_bytes(marks_document(parts.source.facts(), window)))
        return cached_answer(request, answer)

    return routes
