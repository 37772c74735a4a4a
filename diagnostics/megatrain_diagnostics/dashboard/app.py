"""The application: routes, refusals and the guard before them, put together. Nothing is decided here."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends, FastAPI

import megatrain
from megatrain_diagnostics.dashboard import assets
from megatrain_diagnostics.dashboard.actions.desk import ActionDesk
from megatrain_diagnostics.dashboard.answers.document import ErrorDocument
from megatrain_diagnostics.dashboard.answers.errors import add_error_answers, check_query
from megatrain_diagnostics.dashboard.openapi import add_openapi
from megatrain_diagnostics.dashboard.pages.actions import route as actions
from megatrain_diagnostics.dashboard.pages.audit import route as audit
from megatrain_diagnostics.dashboard.pages.checkpoints import route as checkpoints
from megatrain_diagnostics.dashboard.pages.devices import route as devices
from megatrain_diagnostics.dashboard.pages.health import route as health
from megatrain_diagnostics.dashboard.pages.heat import route as heat
from megatrain_diagnostics.dashboard.pages.hosts import route as hosts
from megatrain_diagnostics.dashboard.pages.incidents import route as incidents
from megatrain_diagnostics.dashboard.pages.job import route as job
from megatrain_diagnostics.dashboard.pages.live import route as live
from megatrain_diagnostics.dashboard.pages.live.streams import LiveStreams
from megatrain_diagnostics.dashboard.pages.logs import route as logs
from megatrain_diagnostics.dashboard.pages.marks import route as marks
from megatrain_diagnostics.dashboard.pages.notes import route as notes
from megatrain_diagnostics.dashboard.pages.overview import route as overview
from megatrain_diagnostics.dashboard.pages.ranks import grid_route as grid
from megatrain_diagnostics.dashboard.pages.ranks import route as ranks
from megatrain_diagnostics.dashboard.pages.runbooks import route as runbooks
from megatrain_diagnostics.dashboard.pages.session import route as session
from megatrain_diagnostics.dashboard.pages.stragglers import route as stragglers
from megatrain_diagnostics.dashboard.pages.timeline import route as timeline
from megatrain_diagnostics.dashboard.parts import Parts
from megatrain_diagnostics.dashboard.security.attempts import Attempts
from megatrain_diagnostics.dashboard.security.guard import Guard
from megatrain_diagnostics.dashboard.security.identity import Identity
from megatrain_diagnostics.dashboard.settings import DashboardSettings
from megatrain_diagnostics.dashboard.sources.protocol import JobSource

API_PREFIX = "/api/v1"
_REFUSALS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorDocument}}
_VIEWS = (
    overview, marks, incidents, hosts, devices, checkpoints, logs, stragglers, ranks, heat, grid, timeline, job,
    runbooks,
)  # fmt: skip
"""Each has `router(parts)`."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """An application, and what its server has to end."""

    app: FastAPI
    streams: LiveStreams
    session: str
    """New with every life of the server."""


def make_app(
    source: JobSource,
    settings: DashboardSettings,
    desk: ActionDesk | None = None,
    *,
    files: Mapping[str, assets.Asset] | None = None,
    clock: Callable[[], float] = time.time,
) -> Dashboard:
    """Return the application that shows `source`. `desk` None: nothing to act on; `files` None: the installed ones."""
    parts = Parts(source, settings, clock)
    identity = Identity(settings, Attempts(settings.limits.max_wrong_tokens))
    session_id = secrets.token_hex(8)
    streams = LiveStreams(source, settings.limits, session_id, clock=clock)
    routers = (*routers_of_job(parts, streams, desk), session.router(settings, identity, clock))
    app = api_app(routers)
    app.include_router(health.router(lambda: source.is_recorded or source.snapshot() is not None))
    add_openapi(app, API_PREFIX)
    app.include_router(assets.router(assets.installed_assets() if files is None else files, settings.base_path))
    app.add_middleware(Guard, settings=settings, identity=identity, clock=clock)
    return Dashboard(app, streams, session_id)


def api_app(routers: Sequence[APIRouter]) -> FastAPI:
    """Return an application with these routes below the API's prefix, without anything before them."""
    app = FastAPI(
        title="megatrain dashboard",
        version=megatrain.__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    add_error_answers(app)
    for routes in routers:
        app.include_router(routes, prefix=API_PREFIX, dependencies=[Depends(check_query)], responses=_REFUSALS)
    return app


def routers_of_job(parts: Parts, streams: LiveStreams, desk: ActionDesk | None) -> tuple[APIRouter, ...]:
    """Return the routers of all that is asked about one job, without their prefix."""
    return (
        *(view.router(parts) for view in _VIEWS),
        live.router(streams),
        actions.router(parts, desk),
        audit.router(parts, desk),
        notes.router(parts, None if desk is None else desk.notes),
    )
