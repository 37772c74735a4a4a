"""GET /checkpoints."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from megatrain_diagnostics.dashboard.answers.answer import cached_answer, document_bytes
from megatrain_diagnostics.dashboard.answers.questions import From, To
from megatrain_diagnostics.dashboard.pages.checkpoints.document import CheckpointsDocument
from megatrain_diagnostics.dashboard.pages.checkpoints.view import checkpoints_document
from megatrain_diagnostics.dashboard.parts import Parts


def router(parts: Parts) -> APIRouter:
    """Return the route."""
    routes = APIRouter(tags=["checkpoints"])

    @routes.get("/checkpoints", response_model=CheckpointsDocument)
    def checkpoints(request: Request, begin: From = "", end: To = "") -> Response:
        """Return the checkpoints that were written in a part of the run, as they were at the last look, newest first.

        The one that the job would go on from is always among them.
        """
        window = parts.window(begin, end)
        version = parts.source.live().versions["checkpoints"]

        def make() -> bytes:
            return document_bytes(checkpoints_document(parts.source.facts().checkpoints, window))

        return cached_answer(request, parts.answers.get(("checkpoints", version, window), make))

    return routes
