"""The open jobs: a job is opened at its first request and closed when requests cease. A few are open at a time.

A job that ended or restarted since it was opened is opened again. A running job is read from etcd, other jobs from
their directories. All methods run on one event loop; slow work runs in threads.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.records.job_keys import JobKeys
from megatrain.run_files.action_log import ACTIONS_NAME, ActionLog
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.actions.backend import EtcdBackend
from megatrain_dashboard.actions.handler import ActionHandler
from megatrain_dashboard.api.jobs.view import why_not_opened
from megatrain_dashboard.api.live import LiveStreams
from megatrain_dashboard.app import api_app, routers_of_job
from megatrain_dashboard.parts import JobsParts
from megatrain_dashboard.responses.errors import internal_error, not_found, shown, unavailable
from megatrain_dashboard.sources.live_job import LiveJob
from megatrain_dashboard.sources.protocol import JobSource
from megatrain_dashboard.sources.recorded_job import RecordedJob
from megatrain_dashboard.sources.runs.etcd_polls import EtcdAccess
from megatrain_dashboard.sources.runs.job_seen import JobSeen
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.jobs.run_state import RunState

_logger = logging.getLogger(__name__)
MAX_OPEN = 8
"""Limit of the open jobs. Each has three threads, and uses about 0.2 GB while it is viewed."""
IDLE_S = 300.0
_SWEEP_S = 15.0
_FIRST_POLL_S = 10.0


_Origin = EtcdAccess | RunState | None
"""The etcd that holds a job; else the state of the job as its directory shows it."""


@dataclass(slots=True)
class _OpenJob:
    """An open job. `origin`: its source; `num_asking`: requests that are being answered, streams included."""

    origin: _Origin
    app: FastAPI
    streams: LiveStreams
    closing: ExitStack
    wait: Callable[[float], bool] | None = None
    """For a job that is over: waits until its directory has been read, because no later event reports that."""
    num_asking: int = 0
    asked_s: float = 0.0


@dataclass(slots=True)
class OpenJobs:
    """Opens jobs of the catalog of `parts`. `most`: the greatest number of jobs that are open at a time."""

    parts: JobsParts
    most: int = MAX_OPEN
    idle_s: float = IDLE_S
    _open: dict[str, _OpenJob] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sweeper: asyncio.Task[None] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the open jobs."""
        return tuple(self._open)

    @asynccontextmanager
    async def asked(self, name: str) -> AsyncIterator[FastAPI]:
        """Yield the application of a job and keep it open during a request.

        Raises: RefusalError where there is no such job, the job cannot be shown, or too many jobs are in use.
        """
        async with self._lock:
            job = await self._opened(name)
            job.num_asking += 1
        try:
            if job.wait is not None:
                await asyncio.to_thread(job.wait, _FIRST_POLL_S)
                job.wait = None
            yield job.app
        finally:
            job.num_asking -= 1
            job.asked_s = asyncio.get_running_loop().time()

    async def _opened(self, name: str) -> _OpenJob:
        seen = self.parts.catalog.last_poll().jobs.get(name)
        if seen is None:
            raise not_found(f"{shown(name)}: no such job; api/v1/jobs lists the jobs")
        if why := why_not_opened(seen):
            raise not_found(f"job {shown(name)} cannot be shown here: {why}")
        origin = _origin(seen)
        known = self._open.get(name)
        if known is not None and known.origin == origin:
            return known
        if known is not None:
            await self._close(name)
        await self._close_one_if_full()
        job = await asyncio.to_thread(self._made, seen, origin)
        self._open[name] = job
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.create_task(self._sweep())
        return job

    async def _close_one_if_full(self) -> None:
        """Close the least recently used job if too many are open. Raises: RefusalError where all are in use."""
        if len(self._open) < self.most:
            return
        idle = [name for name, job in self._open.items() if not job.num_asking]
        if not idle:
            raise unavailable(f"{self.most} jobs are open already; close the page of one of them", retry_after_s=10)
        await self._close(min(idle, key=lambda name: self._open[name].asked_s))

    async def _sweep(self) -> None:
        while self._open:
            await asyncio.sleep(_SWEEP_S)
            async with self._lock:
                await self.close_idle()

    async def close_idle(self) -> None:
        """Close the jobs that had no request for `idle_s`."""
        before_s = asyncio.get_running_loop().time() - self.idle_s
        for name in [name for name, job in self._open.items() if not job.num_asking and job.asked_s <= before_s]:
            await self._close(name)

    async def _close(self, name: str) -> None:
        job = self._open.pop(name)
        job.streams.close()
        await asyncio.to_thread(job.closing.close)

    def close_streams(self) -> None:
        """Close all streams, because the server ends."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for job in self._open.values():
            job.streams.close()

    def close(self) -> None:
        """Close all jobs, after the server has ended."""
        for job in self._open.values():
            job.closing.close()
        self._open.clear()

    def _made(self, seen: JobSeen, origin: _Origin) -> _OpenJob:
        """Open a job. Raises: RefusalError where its directory has become a symbolic link."""
        assert seen.summary is not None, "why_not_opened has checked this"
        root = seen.summary.root
        if root.is_symlink():
            raise not_found(f"job {shown(seen.name)}: {root} has become a symbolic link, which is not followed")
        run, closing = RunDirectory(root), ExitStack()
        source: JobSource
        handler: ActionHandler | None = None
        wait: Callable[[float], bool] | None = None
        if not isinstance(origin, EtcdAccess):
            source = recorded = RecordedJob(run)
            wait = recorded.wait_for_poll
        else:
            client = closing.enter_context(EtcdClient(origin.settings))
            keys = JobKeys(origin.job)
            source = LiveJob(client, keys, run)
            handler = ActionHandler(EtcdBackend(client, keys), ActionLog(run.diagnosis / ACTIONS_NAME))
        closing.callback(source.close)
        parts = self.parts.of_one(source)
        streams = LiveStreams(source, parts.settings.limits, secrets.token_hex(8), clock=parts.clock)
        app = api_app(routers_of_job(parts, streams, handler))

        async def of_mistake(request: Request, error: Exception) -> Response:
            return internal_error(request.url.path, error)

        app.add_exception_handler(Exception, of_mistake)
        _logger.info("job %s is opened from %s", seen.name, "etcd" if handler else "its run directory")
        return _OpenJob(origin, app, streams, closing, wait)


def _origin(seen: JobSeen) -> _Origin:
    if seen.snapshot is not None:
        return seen.access
    return None if seen.summary is None else seen.summary.run_state
