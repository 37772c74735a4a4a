"""A POST to etcd, or to a receiver of notifications, and its response, as the bytes of a socket.

h11 parses HTTP/1.1, and the caller owns the socket. A watch must continue after a timeout in the middle of a chunk. An
HTTP client with its own socket cannot do that, and limits the time of one read, not of the whole response.
"""

from __future__ import annotations

from collections.abc import Sequence

import h11

from megatrain_job.coordination.errors import InvalidResponseError

_MAX_HEAD_BYTES = 64 << 10
"""Largest head of a response, chunk header, and trailer."""
_MAX_INTERIM = 16
"""At most this many responses with a status of 1xx may precede the final response; h11 accepts any number."""
_SHOWN = 120
_POST = h11.Request(method="POST", target="/", headers=[("Host", "etcd"), ("Content-Length", "0")])
_POSTED = h11.EndOfMessage()
"""h11 parses a response only after a request. h11 always gets this request, because its check of each real request
would cost as much as parsing."""


class HttpExchange:
    """A POST and its response. Send `request`, then pass received bytes to `feed`, which returns those of the body."""

    def __init__(
        self,
        authority: str,
        path: str,
        body: bytes,
        token: str | None,
        *,
        is_last: bool,
        content_type: str = "application/json",
    ) -> None:
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {authority}",
            f"Content-Type: {content_type}",
            f"Content-Length: {len(body)}",
        ]
        if token is not None:
            lines.append(f"Authorization: {token}")
        if is_last:
            lines.append("Connection: close")
        self.request = ("\r\n".join(lines) + "\r\n\r\n").encode("ascii") + body
        self.status = 0
        """0 until the head of the response has arrived."""
        self.headers: Sequence[tuple[bytes, bytes]] = ()
        """The response's headers; names in lower case."""
        self.is_complete = False
        self._num_interim = 0
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._connection.send(_POST)
        self._connection.send(_POSTED)

    @property
    def is_last(self) -> bool:
        """Whether the server closes the connection after its response."""
        return self._connection.their_state is not h11.DONE

    def feed(self, data: bytes) -> bytes:
        """Process the next bytes, and return those that belong to the body. Raises: InvalidResponseError."""
        body = bytearray()
        try:
            self._connection.receive_data(data)
            while self._take(self._connection.next_event(), body):
                pass
        except h11.RemoteProtocolError as error:
            raise InvalidResponseError(f"the answer is not HTTP: {str(error)[:_SHOWN]}") from error
        if self.is_complete and (rest := self._connection.trailing_data[0]):
            raise InvalidResponseError(f"bytes after the end of the answer: {rest[:40]!r}")
        return bytes(body)

    def end(self) -> None:
        """Handle the end of the connection. Raises: InvalidResponseError when the response was not complete."""
        if self.is_complete:
            return
        try:
            self.feed(b"")
        except InvalidResponseError as error:
            where = "in the middle of" if self.status or self._connection.trailing_data[0] else "without"
            raise InvalidResponseError(f"the connection was closed {where} an answer") from error

    def _take(self, event: object, body: bytearray) -> bool:
        """Process one event; return whether there may be another. Raises: InvalidResponseError."""
        match event:
            case h11.Data():
                body += event.data
            case h11.InformationalResponse():
                self._num_interim += 1
                if self._num_interim > _MAX_INTERIM:
                    raise InvalidResponseError(
                        f"more than {_MAX_INTERIM} interim answers, the last with {event.status_code}"
                    )
            case h11.Response():
                self.status = event.status_code
                self.headers = event.headers
            case h11.EndOfMessage():
                self.is_complete = True
            case _:  # more bytes are needed, or the connection is over
                return False
        return True
