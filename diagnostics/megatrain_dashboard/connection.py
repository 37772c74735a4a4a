"""One client connection: uvicorn's protocol with limits that it lacks, so that slow or malformed clients cost little.

The head of a request must arrive within a time limit, and the client must read its responses. The number of connections
and the unread bytes of all connections are limited. A request that the parser rejects gets the same response as any
other refusal, with the security headers.
"""

from __future__ import annotations

import asyncio
import http
import socket
import struct
from contextlib import suppress
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatrain_dashboard.responses.errors import RefusalError, refusal_response, unavailable
from megatrain_dashboard.security.headers import secured
from megatrain_dashboard.settings import Limits

_LINGER_S = 1.0
"""The time that the server reads and discards data after a refusal. Otherwise the client would not see the refusal."""


def connection_class(limits: Limits) -> type[H11Protocol]:
    """Return the protocol of connections with these limits."""

    class LimitedConnection(GuardedConnection):
        pass

    LimitedConnection.limits = limits
    return LimitedConnection


class GuardedConnection(H11Protocol):
    """A connection with limits."""

    limits: ClassVar[Limits] = Limits()
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _end_timer: asyncio.TimerHandle | None = None
    _is_refused = False
    _num_unread = 0
    _paused_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(unavailable(f"{self.limits.max_connections} connections are open already"))
            return
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._stall_timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)
            self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._end_soon(self.limits.stall_s)
        else:
            self._watch_head()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_soon(self.limits.stall_s)

    def shutdown(self) -> None:
        if self._is_refused:
            self.transport.abort()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        text = f"this is not an HTTP request, or its head has more than {self.limits.max_head_bytes} bytes"
        self._refuse(RefusalError(400, text))

    def pause_writing(self) -> None:
        """Begin to watch a client that reads more slowly than the server writes."""
        super().pause_writing()
        self._num_unread = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.limits.stall_s, self._check_stall)
        self._paused_s = self.loop.time()
        self._drop_slow_readers()

    def _drop_slow_readers(self) -> None:
        """While there are too many unread bytes, drop connections that do not read, the longest paused first."""
        waiting = [
            connection
            for connection in self.connections
            if isinstance(connection, GuardedConnection) and connection._stall_timer
        ]
        sizes = {connection: connection.transport.get_write_buffer_size() for connection in waiting}
        excess = sum(sizes.values()) - self.limits.max_unread_bytes
        for connection in sorted(waiting, key=lambda connection: connection._paused_s):
            if excess <= 0:
                return
            excess -= sizes[connection]
            connection._drop()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check_stall(self) -> None:
        num_unread = self.transport.get_write_buffer_size()
        if self._num_unread - num_unread < self.limits.stall_bytes:
            self._drop()
            return
        self._num_unread = num_unread
        self._stall_timer = self.loop.call_later(self.limits.stall_s, self._check_stall)

    def _watch_head(self) -> None:
        """Run the timer while only a part of a request's head has arrived."""
        is_partial = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if is_partial and not self._is_refused:
            self._start_head_timer()
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_head_timer(self) -> None:
        # new bytes do not restart the timer: otherwise a client that sends one now and then would never time out
        if self._head_timer is None:
            text = f"the head of the request did not arrive within {self.limits.head_s:g} s"
            self._head_timer = self.loop.call_later(self.limits.head_s, self._refuse, RefusalError(408, text))

    def _refuse(self, refusal: RefusalError) -> None:
        """Answer without the application, and end the connection."""
        if self.transport.is_closing() or self._is_refused:
            return
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # a response has begun, so a refusal can no longer be sent
            return
        self._is_refused = True
        self._unset_keepalive_if_required()
        self.transport.write(_refusal_bytes(refusal))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._end_soon(_LINGER_S)

    def _end_soon(self, seconds: float) -> None:
        """End the connection after `seconds`, even if data is still to be sent."""
        if self._end_timer is None:
            self._end_timer = self.loop.call_later(seconds, self._drop)

    def _drop(self) -> None:
        """End the connection at once, and make the system discard the data that the client did not read."""
        connected = self.transport.get_extra_info("socket")
        with suppress(OSError):  # the connection may have ended by itself
            if connected is not None:
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


def _refusal_bytes(refusal: RefusalError) -> bytes:
    response = refusal_response(refusal)
    headers = secured([*response.raw_headers, (b"connection", b"close")])
    phrase = http.HTTPStatus(refusal.status).phrase
    head = [f"HTTP/1.1 {refusal.status} {phrase}".encode(), *(name + b": " + value for name, value in headers)]
    return b"\r\n".join(head) + b"\r\n\r\n" + bytes(response.body)
