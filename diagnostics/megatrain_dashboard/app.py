"""Builds the FastAPI application: routers, error responses, access guard. No business logic."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from starlette.responses import Response

import megatrain
from megatrain_dashboard import assets
from megatrain_dashboard.actions.handler import ActionHandler
from megatrain_dashboard.api import (
    actions,
    audit,
    checkpoints,
    devices,
    health,
    hosts,
    job,
    live,
    logs,
    marks,
    notes,
    session,
)
from megatrain_dashboard.api.heat import route as heat
from megatrain_dashboard.api.host_data import route as host_data
from megatrain_dashboard.api.incidents import route as incidents
from megatrain_dashboard.api.live import LiveStreams
from megatrain_dashboard.api.overview import route as overview
from megatrain_dashboard.api.ranks import route as ranks
from megatrain_dashboard.api.runbooks import route as runbooks
from megatrain_dashboard.api.stragglers import route as stragglers
from megatrain_dashboard.api.timeline import route as timeline
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import JSON_TYPE
from megatrain_dashboard.responses.document import ErrorDocument
from megatrain_dashboard.responses.errors import add_error_responses, check_query
from megatrain_dashboard.security.authenticator import Attempts, Authenticator
from megatrain_dashboard.security.guard import Guard
from megatrain_dashboard.settings import DashboardSettings
from megatrain_dashboard.sources.protocol import JobSource

API_PREFIX = "/api/v1"
_REFUSALS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorDocument}}
_ROUTERS = (
    overview, marks, incidents, hosts, host_data, devices, checkpoints, logs, stragglers, ranks, heat, timeline,
    job, runbooks,
)  # fmt: skip
"""The modules whose `router(parts)` returns the routes of one part of the API."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """An application, and the streams that its server must close."""

    app: FastAPI
    streams: LiveStreams
    session: str
    """Changes with every start of the server."""


def make_app(
    source: JobSource,
    settings: DashboardSettings,
    handler: ActionHandler | None = None,
    *,
    files: Mapping[str, assets.Asset] | None = None,
    clock: Callable[[], float] = time.time,
) -> Dashboard:
    """Return the application that shows `source`.

    `handler` None: no actions are possible. `files` None: serve the installed files.
    """
    parts = DashboardParts(source, settings=settings, clock=clock)
    authenticator = Authenticator(settings, Attempts(settings.limits.max_wrong_tokens))
    session_id = secrets.token_hex(8)
    streams = LiveStreams(source, settings.limits, session_id, clock=clock)
    routers = (*routers_of_job(parts, streams, handler), session.router(settings, authenticator, clock))
    app = api_app(routers)
    app.include_router(health.router(lambda: source.is_recorded or source.snapshot() is not None))
    add_openapi(app)
    app.include_router(assets.router(assets.installed_assets() if files is None else files, settings.base_path))
    app.add_middleware(Guard, settings=settings, authenticator=authenticator, clock=clock)
    return Dashboard(app, streams, session_id)


def api_app(routers: Sequence[APIRouter]) -> FastAPI:
    """Return an application with these routes below the API's prefix, without middleware."""
    app = FastAPI(
        title="megatrain dashboard",
        version=megatrain.__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    add_error_responses(app)
    for routes in routers:
        app.include_router(routes, prefix=API_PREFIX, dependencies=[Depends(check_query)], responses=_REFUSALS)
    return app


def routers_of_job(parts: DashboardParts, streams: LiveStreams, handler: ActionHandler | None) -> tuple[APIRouter, ...]:
    """Return the routers of all requests about one job, without their prefix."""
    return (
        *(module.router(parts) for module in _ROUTERS),
        live.router(streams),
        actions.router(parts, handler),
        audit.router(parts, handler),
        notes.router(parts, None if handler is None else handler.notes),
    )


def add_openapi(app: FastAPI) -> None:
    """Add the route that describes `app`. Call it after all routes of the API are added.

    The description is generated from routes and documents, so it cannot differ from the responses.
    """

    @app.get(f"{API_PREFIX}/openapi.json", include_in_schema=False, dependencies=[Depends(check_query)])
    async def openapi_json() -> Response:
        return Response(json.dumps(app.openapi()), media_type=JSON_TYPE)
