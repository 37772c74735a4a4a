"""The application of many jobs: one guard before all requests, the list, and jobs/NAME/ for each job.

    jobs            the page, with the list     api/v1/jobs, compare, live, session     its API
    jobs/NAME/      the page, of one job        jobs/NAME/api/v1/...                    its API, as of a single job

A session is valid for all jobs: the guard authenticates a caller before the server checks whether the job exists.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from megatrain_dashboard import assets
from megatrain_dashboard.api import compare, health, live, session
from megatrain_dashboard.api.jobs import route as jobs
from megatrain_dashboard.api.live import LiveStreams
from megatrain_dashboard.app import add_openapi, api_app
from megatrain_dashboard.jobs.open_jobs import OpenJobs
from megatrain_dashboard.parts import JobsParts
from megatrain_dashboard.security.authenticator import Attempts, Authenticator
from megatrain_dashboard.security.guard import API, JOB_KEY, SESSION_PATH, Guard
from megatrain_dashboard.settings import DashboardSettings
from megatrain_dashboard.sources.runs.catalog import JobCatalog

_LIST = "/jobs"


@dataclass(frozen=True, slots=True)
class JobsDashboard:
    """An application, and what its server must close."""

    app: FastAPI
    streams: LiveStreams
    open_jobs: OpenJobs

    def close(self) -> None:
        """Close all streams, of the list and of every job."""
        self.streams.close()
        self.open_jobs.close_streams()


class JobRouter:
    """Routes requests about one job to that job's application, and all other requests to `app`."""

    def __init__(self, app: ASGIApp, open_jobs: OpenJobs) -> None:
        self._app, self._open_jobs = app, open_jobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job, path = scope.get(JOB_KEY, ""), scope.get("path", "")
        if job and path.startswith(API) and path != SESSION_PATH:
            async with self._open_jobs.asked(job) as app:
                await app(scope, receive, send)
        elif not job and path == "/":
            await RedirectResponse(_LIST[1:], 307)(scope, receive, send)
        elif not job and path.startswith(f"{_LIST}/") and "/" not in (name := path.removeprefix(f"{_LIST}/")):
            # relative addresses of the page's files are valid only below jobs/NAME/
            await RedirectResponse(f"./{name}/" if name else f"..{_LIST}", 308)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def make_jobs_app(
    catalog: JobCatalog,
    settings: DashboardSettings,
    *,
    files: Mapping[str, assets.Asset] | None = None,
    clock: Callable[[], float] = time.time,
) -> JobsDashboard:
    """Return the application that shows the jobs of a catalog. `files`: as in `make_app`."""
    parts = JobsParts(catalog, settings=settings, clock=clock)
    authenticator = Authenticator(settings, Attempts(settings.limits.max_wrong_tokens))
    streams = LiveStreams(catalog, settings.limits, secrets.token_hex(8), clock=clock)
    open_jobs = OpenJobs(parts)
    app = api_app(
        (
            jobs.router(parts),
            compare.router(parts),
            live.router(streams),
            session.router(settings, authenticator, clock),
        )
    )
    app.include_router(health.router(lambda: True))
    add_openapi(app)
    app.include_router(assets.router(assets.installed_assets() if files is None else files, settings.base_path))
    # the middleware that is added last runs first
    app.add_middleware(JobRouter, open_jobs=open_jobs)
    app.add_middleware(Guard, settings=settings, authenticator=authenticator, clock=clock, has_many=True)
    return JobsDashboard(app, streams, open_jobs)
