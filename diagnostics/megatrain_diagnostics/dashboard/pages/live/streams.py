"""Everybody who looks, told of what is new: one task asks the source once a second, every open stream waits for it.

A stream holds no queue: who is slow misses what was said meanwhile and gets the newest, and who does not read at all is
dropped by the connection (connection.py). An event's id is the server's session and a number, so that a page that comes
back is told at once unless nothing happened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from megatrain_diagnostics.dashboard.answers.errors import unavailable
from megatrain_diagnostics.dashboard.pages.live.document import LiveDocument
from megatrain_diagnostics.dashboard.settings import Limits
from megatrain_diagnostics.dashboard.sources.protocol import LiveState

_logger = logging.getLogger(__name__)
TICK_S = 1.0
HEARTBEAT = b": still here\n\n"
_RETRY = b"retry: 2000\n\n"
"""So long a browser waits before it opens a lost stream again, in milliseconds."""


class NewsSource(Protocol):
    """A job, or a list of them."""

    def live(self) -> LiveState:
        """Return which views have something new."""


class LiveStreams:
    """The open streams of a server. Of one event loop."""

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

    def check_room(self, address: str) -> None:
        """Raise a RefusalError where there are too many streams already."""
        limits = self._limits
        if self._is_closed:
            raise unavailable("the dashboard ends")
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
        """Yield what a stream sends, until its time is over or the server ends."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self._limits.stream_s
        told = self._number if last_event_id == self._event_id() else 0
        yield _RETRY
        while not self._is_closed and (left_s := ends_s - loop.time()) > 0:
            changed = self._changed
            if self._number > told:
                told = self._number
                yield self._event
                continue
            try:
                async with asyncio.timeout(min(self._limits.heartbeat_s, left_s)):
                    await changed.wait()
            except TimeoutError:
                yield HEARTBEAT

    async def _tick(self) -> None:
        """Ask the source while anybody listens."""
        trouble = ""
        while self._open:
            try:
                state = await asyncio.to_thread(self._source.live)
                trouble = ""
                if state != self._state:
                    self._say(state)
            except Exception as error:
                # whatever it is, the streams stay open: what was said once is not said each second
                if repr(error) != trouble:
                    _logger.exception("what is new is not known")
                trouble = repr(error)
            await asyncio.sleep(self._tick_s)

    def _say(self, state: LiveState) -> None:
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
