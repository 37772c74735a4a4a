"""GET /live: server-sent events that report which topics have something new. The page then requests the data."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from megatrain_dashboard.api.live.streams import LiveStreams
from megatrain_dashboard.security.roles import caller_of


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
