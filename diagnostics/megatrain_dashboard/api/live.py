"""GET /live: server-sent events that report which topics have changed. The page then requests the data.

One task asks the source once a second, and every open stream waits for it. A stream has no queue: a slow client skips
the events that it missed and gets the newest one. The connection drops a client that does not read at all
(connection.py). An event's id is the server's session and a number, so that a page that reconnects gets an event at
once if something has changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from megatrain_dashboard.responses.document import Document
from megatrain_dashboard.responses.errors import unavailable
from megatrain_dashboard.security.roles import caller_of
from megatrain_dashboard.settings import Limits
from megatrain_dashboard.sources.protocol import LiveState

_logger = logging.getLogger(__name__)
TICK_S = 1.0
HEARTBEAT = b": still here\n\n"
_RETRY = b"retry: 2000\n\n"
"""The time that a browser waits before it opens a lost stream again, in milliseconds."""


class LiveDocument(Document):
    """An event named "change". `versions`: by topic (overview, series, heat, ranks, stragglers, incidents, hosts,
    checkpoints, logs, timeline; of many jobs: jobs), a number that grows; `session` changes with every start of the
    server."""

    session: str
    at_unix_s: float
    step: int | None
    versions: dict[str, int]


class NewsSource(Protocol):
    """A job, or a list of them."""

    def live(self) -> LiveState:
        """Return the versions of the topics."""


class LiveStreams:
    """The open streams of a server. All methods run on one event loop."""

    def __init__(
        self,
        source: NewsSource,
        limits: Limits,
        session: str,
        *,
        clock: Callable[[], float] = time.time,
        tick_s: float = TICK_S,
    ) -> None:
        self._source, self._limits, self._session = source, limits, session
        self._clock, self._tick_s = clock, tick_s
        self._open: Counter[str] = Counter()
        self._number = 0
        self._state: LiveState | None = None
        self._event = b""
        self._changed = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_open(self) -> int:
        return self._open.total()

    def check_limits(self, address: str) -> None:
        """Check that another stream may open.

        Raises: RefusalError where too many streams are open already, or the dashboard is shutting down.
        """
        limits = self._limits
        if self._is_closed:
            raise unavailable("the dashboard is shutting down")
        if self.num_open >= limits.max_streams:
            raise unavailable(f"{limits.max_streams} pages are open already; close one", retry_after_s=10)
        if self._open[address] >= limits.max_streams_per_address:
            text = f"{limits.max_streams_per_address} pages are open already at {address}; close one"
            raise unavailable(text, retry_after_s=10)

    @contextmanager
    def counted(self, address: str) -> Iterator[None]:
        """Count a stream while it is open."""
        self._open[address] += 1
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        self._wake()
        if self._ticker is not None:
            self._ticker.cancel()

    async def events(self, last_event_id: str) -> AsyncIterator[bytes]:
        """Yield the bytes that a stream sends, until its time is over or the server ends."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self._limits.stream_s
        sent = self._number if last_event_id == self._event_id() else 0
        yield _RETRY
        while not self._is_closed and (left_s := ends_s - loop.time()) > 0:
            changed = self._changed
            if self._number > sent:
                sent = self._number
                yield self._event
                continue
            try:
                async with asyncio.timeout(min(self._limits.heartbeat_s, left_s)):
                    await changed.wait()
            except TimeoutError:
                yield HEARTBEAT

    async def _tick(self) -> None:
        """Ask the source once a second while a stream is open."""
        problem = ""
        while self._open:
            try:
                state = await asyncio.to_thread(self._source.live)
                problem = ""
                if state != self._state:
                    self._publish(state)
            except Exception as error:
                # the streams stay open after any error, and the same error is not logged each second
                if repr(error) != problem:
                    _logger.exception("the state of the job cannot be read")
                problem = repr(error)
            await asyncio.sleep(self._tick_s)

    def _publish(self, state: LiveState) -> None:
        self._state = state
        self._number += 1
        document = LiveDocument(
            session=self._session, at_unix_s=self._clock(), step=state.step, versions=dict(state.versions)
        )
        lines = (f"id: {self._event_id()}", "event: change", f"data: {document.model_dump_json()}")
        self._event = ("\n".join(lines) + "\n\n").encode()
        self._wake()

    def _event_id(self) -> str:
        return f"{self._session}-{self._number}"

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class _Stream(StreamingResponse):
    """A stream that is counted from its first byte until it ends for any reason."""

    def __init__(self, streams: LiveStreams, address: str, last_event_id: str) -> None:
        # without this header, proxies buffer the events to send them in larger pieces
        headers = {"x-accel-buffering": "no"}
        super().__init__(streams.events(last_event_id), media_type="text/event-stream", headers=headers)
        self._streams, self._address = streams, address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._streams.counted(self._address):
            await super().__call__(scope, receive, send)


def router(streams: LiveStreams) -> APIRouter:
    """Return the route of the stream."""
    routes = APIRouter(tags=["live"])

    @routes.get("/live", response_class=StreamingResponse)
    async def live(request: Request) -> Response:
        """Send an event "change" (LiveDocument) whenever something is new, at most one a second."""
        address = caller_of(request).address
        streams.check_limits(address)
        return _Stream(streams, address, request.headers.get("last-event-id", ""))

    return routes
