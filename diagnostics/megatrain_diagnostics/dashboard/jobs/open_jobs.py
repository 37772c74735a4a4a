"""The jobs that somebody looks at: opened at the first question, a few at a time, closed when questions cease.

A job that ended, or began again, since it was opened is opened anew: a running one is read from etcd, others from what
they left. All methods are of one event loop; what takes time is done in threads.
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

from megatrain.contracts.action_log import ACTIONS_NAME, ActionLog
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.run_directory import RunDirectory
from megatrain.coordination.client import EtcdClient
from megatrain.jobs.run_standing import RunStanding
from megatrain_diagnostics.dashboard.actions.carrying import EtcdHands
from megatrain_diagnostics.dashboard.actions.desk import ActionDesk
from megatrain_diagnostics.dashboard.answers.errors import internal_error, not_found, shown, unavailable
from megatrain_diagnostics.dashboard.app import api_app, routers_of_job
from megatrain_diagnostics.dashboard.pages.jobs.view import why_not_opened
from megatrain_diagnostics.dashboard.pages.live.streams import LiveStreams
from megatrain_diagnostics.dashboard.parts import JobsParts
from megatrain_diagnostics.dashboard.sources.live_job import LiveJob
from megatrain_diagnostics.dashboard.sources.protocol import JobSource
from megatrain_diagnostics.dashboard.sources.recorded_job import RecordedJob
from megatrain_diagnostics.dashboard.sources.runs.catalog import JobSeen
from megatrain_diagnostics.dashboard.sources.runs.etcd_looks import Reach

_logger = logging.getLogger(__name__)
MOST_OPEN = 8
"""Each has three threads, and some 0.2 GB where it is looked at."""
IDLE_S = 300.0
_SWEEP_S = 15.0
_FIRST_LOOK_S = 10.0


_Origin = Reach | RunStanding | None
"""The etcd that tells of a job; else how the job is by its directory."""


@dataclass(slots=True)
class _OpenJob:
    """`origin`: what it was opened from; `num_asking`: questions that are being answered, streams too."""

    origin: _Origin
    app: FastAPI
    streams: LiveStreams
    closing: ExitStack
    wait: Callable[[float], bool] | None = None
    """Of a job that is over: for what its directory tells to have been read, which no news says later."""
    num_asking: int = 0
    asked_s: float = 0.0


@dataclass(slots=True)
class OpenJobs:
    """Opens jobs of the catalog of `parts`. `most`: that are open at a time."""

    parts: JobsParts
    most: int = MOST_OPEN
    idle_s: float = IDLE_S
    _open: dict[str, _OpenJob] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sweeper: asyncio.Task[None] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of those that are open."""
        return tuple(self._open)

    @asynccontextmanager
    async def asked(self, name: str) -> AsyncIterator[FastAPI]:
        """Have the application of a job during a question. Raises: RefusalError where there is no such job, or room."""
        async with self._lock:
            job = await self._opened(name)
            job.num_asking += 1
        try:
            if job.wait is not None:
                await asyncio.to_thread(job.wait, _FIRST_LOOK_S)
                job.wait = None
            yield job.app
        finally:
            job.num_asking -= 1
            job.asked_s = asyncio.get_running_loop().time()

    async def _opened(self, name: str) -> _OpenJob:
        seen = self.parts.catalog.look().jobs.get(name)
        if seen is None:
            raise not_found(f"{shown(name)}: no such job; api/v1/jobs tells which there are")
        if why := why_not_opened(seen):
            raise not_found(f"job {shown(name)} cannot be shown here: {why}")
        origin = _origin(seen)
        known = self._open.get(name)
        if known is not None and known.origin == origin:
            return known
        if known is not None:
            await self._close(name)
        await self._make_room()
        job = await asyncio.to_thread(self._made, seen, origin)
        self._open[name] = job
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.create_task(self._sweep())
        return job

    async def _make_room(self) -> None:
        """Close the least recently used one. Raises: RefusalError where all are in use."""
        if len(self._open) < self.most:
            return
        idle = [name for name, job in self._open.items() if not job.num_asking]
        if not idle:
            raise unavailable(f"{self.most} jobs are being looked at already; close the page of one", retry_after_s=10)
        await self._close(min(idle, key=lambda name: self._open[name].asked_s))

    async def _sweep(self) -> None:
        while self._open:
            await asyncio.sleep(_SWEEP_S)
            async with self._lock:
                await self.close_idle()

    async def close_idle(self) -> None:
        """Close those without a request for a while."""
        before_s = asyncio.get_running_loop().time() - self.idle_s
        for name in [name for name, job in self._open.items() if not job.num_asking and job.asked_s <= before_s]:
            await self._close(name)

    async def _close(self, name: str) -> None:
        job = self._open.pop(name)
        job.streams.close()
        await asyncio.to_thread(job.closing.close)

    def close_streams(self) -> None:
        """End all streams: the server ends."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for job in self._open.values():
            job.streams.close()

    def close(self) -> None:
        """Close all, when the server has ended."""
        for job in self._open.values():
            job.closing.close()
        self._open.clear()

    def _made(self, seen: JobSeen, origin: _Origin) -> _OpenJob:
        """Open a job. Raises: RefusalError where it went away meanwhile."""
        assert seen.glance is not None, "why_not_opened has said so"
        root = seen.glance.root
        if root.is_symlink():
            raise not_found(f"job {shown(seen.name)}: {root} is a symbolic link by now, and none is followed")
        run, closing = RunDirectory(root), ExitStack()
        source: JobSource
        desk: ActionDesk | None = None
        wait: Callable[[float], bool] | None = None
        if not isinstance(origin, Reach):
            source = recorded = RecordedJob(run)
            wait = recorded.wait_for_look
        else:
            client = closing.enter_context(EtcdClient(origin.settings))
            keys = JobKeys(origin.job)
            source = LiveJob(client, keys, run)
            desk = ActionDesk(EtcdHands(client, keys), ActionLog(run.diagnosis / ACTIONS_NAME))
        closing.callback(source.close)
        parts = self.parts.of_one(source)
        streams = LiveStreams(source, parts.settings.limits, secrets.token_hex(8), clock=parts.clock)
        app = api_app(routers_of_job(parts, streams, desk))

        async def of_mistake(request: Request, error: Exception) -> Response:
            return internal_error(request.url.path, error)

        app.add_exception_handler(Exception, of_mistake)
        _logger.info("job %s is opened, %s", seen.name, "as etcd tells of it" if desk else "as its directory has it")
        return _OpenJob(origin, app, streams, closing, wait)


def _origin(seen: JobSeen) -> _Origin:
    if seen.snapshot is not None:
        return seen.reach
    return None if seen.glance is None else seen.glance.standing
