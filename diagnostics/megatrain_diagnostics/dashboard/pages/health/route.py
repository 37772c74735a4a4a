"""GET /healthz: the server answers. GET /readyz: it knows something of the job. For whoever keeps it running."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from starlette.responses import Response

from megatrain_diagnostics.dashboard.answers.answer import document_answer
from megatrain_diagnostics.dashboard.pages.health.document import HealthDocument


def router(is_ready: Callable[[], bool]) -> APIRouter:
    """Return the two routes, which stand outside the API: callers are not authenticated."""
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz", response_model=HealthDocument)
    async def healthz() -> Response:
        """Say that the server answers."""
        return document_answer(HealthDocument(is_ready=is_ready()))

    @routes.get("/readyz", response_model=HealthDocument)
    async def readyz() -> Response:
        """Say whether there is anything to show: 503 until etcd has answered once."""
        answer = document_answer(HealthDocument(is_ready=is_ready()))
        answer.status_code = 200 if is_ready() else 503
        return answer

    return routes
