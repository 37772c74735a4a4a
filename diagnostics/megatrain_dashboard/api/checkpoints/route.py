"""GET /checkpoints."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from megatrain_dashboard.api.checkpoints.document import CheckpointsDocument
from megatrain_dashboard.api.checkpoints.view import checkpoints_document
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import cached_response, document_bytes
from megatrain_dashboard.responses.query_parameters import From, To


def router(parts: DashboardParts) -> APIRouter:
    """Return the route that answers with the checkpoints of a part of the run."""
    routes = APIRouter(tags=["checkpoints"])

    @routes.get("/checkpoints", response_model=CheckpointsDocument)
    def checkpoints(request: Request, begin: From = "", end: To = "") -> Response:
        """Return the checkpoints that were written in a part of the run, in the state last read, newest first.

        The checkpoint that the job would resume from is always among them.
        """
        window = parts.window(begin, end)
        version = parts.source.live().versions["checkpoints"]

        def make() -> bytes:
            return document_bytes(checkpoints_document(parts.source.facts().checkpoints, window))

        return cached_response(request, parts.responses.get(("checkpoints", version, window), make))

    return routes
