"""A streamed response of etcd: its messages, one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from megatrain.contracts.closable import Closable
from megatrain_job.coordination.errors import InvalidResponseError
from megatrain_job.coordination.gateway_response import JsonObject, parse_object, read_response, unwrap
from megatrain_job.coordination.http_exchange import HttpExchange
from megatrain_job.coordination.settings import Endpoint
from megatrain_job.coordination.transport import MAX_CONTENT_BYTES, Deadline, EtcdConnection


class JsonStream(Closable):
    """A streamed response: one JSON object per line, independent of packet boundaries.

    One thread reads; any thread may call `interrupt`.
    """

    def __init__(
        self, connection: EtcdConnection, exchange: HttpExchange, on_close: Callable[[JsonStream], None]
    ) -> None:
        self._connection = connection
        self._exchange = exchange
        self._on_close = on_close
        self._partial = bytearray()
        self._lines: deque[bytes] = deque()

    @property
    def endpoint(self) -> Endpoint:
        return self._connection.endpoint

    def start(self, deadline: Deadline) -> None:
        """Send the request and wait for the first message. Raises: OSError, InvalidResponseError, GatewayError."""
        self._connection.send(self._exchange.request, deadline)
        while not self._exchange.status:
            self._receive(deadline)
        if self._exchange.status != 200:
            content = (
                b"\n".join(self._lines)
                + bytes(self._partial)
                + self._connection.read_response(self._exchange, deadline)
            )
            read_response(self._exchange.status, content)
        while not self._lines:
            if not self._receive(deadline) and not self._lines:
                raise InvalidResponseError("the stream ended before its first message")

    def next(self, silence_s: float) -> JsonObject | None:
        """Return the next message; None if none was complete within `silence_s`.

        Raises: OSError or InvalidResponseError when the stream has ended or broken, GatewayError when etcd ends it
        with an error.
        """
        deadline = Deadline(silence_s)
        while not self._lines:
            try:
                is_open = self._receive(deadline)
            except TimeoutError:
                return None
            if not is_open and not self._lines:
                raise InvalidResponseError("the stream ended")
        return unwrap(parse_object(self._lines.popleft()))

    def interrupt(self) -> None:
        """Make the reader's current and later reads fail."""
        self._connection.interrupt()

    def close(self) -> None:
        self._on_close(self)
        self._connection.close()

    def _receive(self, deadline: Deadline) -> bool:
        """Read arrived bytes; return whether more may follow. An incomplete last line is never returned."""
        data = self._connection.receive(deadline.remaining_s())
        if not data:
            self._exchange.end()
            return False
        first, *more = self._exchange.feed(data).split(b"\n")
        self._partial += first
        for piece in more:
            if self._partial.strip():
                self._lines.append(bytes(self._partial))
            self._partial = bytearray(piece)
        if len(self._partial) > MAX_CONTENT_BYTES:
            raise InvalidResponseError(f"a message is longer than {MAX_CONTENT_BYTES >> 20} MiB")
        return not self._exchange.is_complete
