"""GET /healthz: whether the server answers. GET /readyz: whether it has data of the job. Both are for probes."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from starlette.responses import Response

from megatrain_dashboard.responses.cache import document_response
from megatrain_dashboard.responses.document import Document


class HealthDocument(Document):
    """The response of /healthz and /readyz. It contains nothing about the job: callers are not authenticated."""

    is_ready: bool


def router(is_ready: Callable[[], bool]) -> APIRouter:
    """Return the two routes. They are outside the API, because their callers are not authenticated."""
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz", response_model=HealthDocument)
    async def healthz() -> Response:
        """Return status 200: the server answers."""
        return document_response(HealthDocument(is_ready=is_ready()))

    @routes.get("/readyz", response_model=HealthDocument)
    async def readyz() -> Response:
        """Return status 200 if there is data to show, else 503: a running job has none until etcd has answered once."""
        response = document_response(HealthDocument(is_ready=is_ready()))
        response.status_code = 200 if is_ready() else 503
        return response

    return routes
