"""Limits the number of requests that read many events, and of downloads. Each download also has a deadline.

A few requests run, a few wait, and all others are refused with 503.

A download is made piece by piece while it is sent. Its source data stays in memory until the last piece is sent; for
the largest file it is half a gigabyte. The two limits bound the memory that slow or disconnected clients hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator

from starlette.concurrency import iterate_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from megatrain_dashboard.responses.errors import unavailable

NUM_RUNNING = 3
"""Limit of the requests that run. Each may hold about 100 MB while it runs, and DuckDB uses all cores for each."""
NUM_WAITING = 24
WAIT_S = 20.0
NUM_DOWNLOADS = 2
"""Limit of the files that are made while they are sent. Their source data stays in memory until the client has read
all of it."""
_MAX_S = 600.0
"""Time limit of a download, long enough for the largest table over a slow connection."""


class HeavyQueries:
    """Lets `num_running` requests run and `num_waiting` wait for up to `wait_s`, and refuses all others with 503.

    All methods run on one event loop.
    """

    def __init__(
        self,
        *,
        num_running: int = NUM_RUNNING,
        num_waiting: int = NUM_WAITING,
        wait_s: float = WAIT_S,
        refusal: str = "too many expensive requests are in progress; try again in a moment",
    ) -> None:
        self._free = asyncio.Semaphore(num_running)
        self._num_waiting, self._most_waiting, self._wait_s = 0, num_waiting, wait_s
        self._refusal = refusal

    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot during a request, as a dependency of a route. Raises: RefusalError (503)."""
        if self._free.locked() and self._num_waiting >= self._most_waiting:
            raise unavailable(self._refusal)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise unavailable("other expensive requests are still in progress; try again in a moment") from None
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._free.release()


def downloads() -> HeavyQueries:
    """Return the limit on downloads. No download waits, because it would occupy a slot of heavy requests."""
    refusal = f"{NUM_DOWNLOADS} files are being downloaded already; try again when they are complete"
    return HeavyQueries(num_running=NUM_DOWNLOADS, num_waiting=0, refusal=refusal)


class Download(StreamingResponse):
    """The pieces of a file called `name`. Their memory is freed when the response ends for any reason."""

    def __init__(
        self, pieces: Generator[str] | Generator[bytes], media_type: str, name: str, *, most_s: float = _MAX_S
    ) -> None:
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        super().__init__(iterate_in_threadpool(pieces), media_type=media_type, headers=headers)
        self._pieces, self._most_s = pieces, most_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._most_s):
                await super().__call__(scope, receive, send)
        finally:
            # a cancelled task is a reference cycle: without this, all that the generator holds would stay in memory
            # until the next garbage collection
            self._pieces.close()
