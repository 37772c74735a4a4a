"""How bytes reach a member of etcd and come back: the order of endpoints, connections, HTTP exchanges and streams.

A connection is TCP or a unix socket, with or without TLS. Every step is under an absolute deadline; only name
resolution is the system's, and not limited by it.

h11 parses HTTP/1.1, and this client owns the socket. An HTTP client with its own socket cannot continue after a timeout
in the middle of a chunk, which a watch needs, and its limit is for one read, not for the whole.
"""

from __future__ import annotations

import itertools
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import h11

from megatrain_job.coordination.errors import GarbageError
from megatrain_job.coordination.gateway_response import JsonObject, parse_object, read_response, unwrap
from megatrain_job.coordination.settings import Endpoint

_MAX_HEAD_BYTES = 64 << 10
"""Largest head of a response, line before a chunk, and trailer."""
_MAX_INTERIM = 16
"""Answers with a status of 1xx before the one that counts: h11 accepts any number."""
_SHOWN = 120
_POST = h11.Request(method="POST", target="/", headers=[("Host", "etcd"), ("Content-Length", "0")])
_POSTED = h11.EndOfMessage()
"""The parts of a request that h11 needs to parse the response. Checking each request would cost as much as reading."""
_READ_BYTES = 1 << 16
MAX_CONTENT_BYTES = 64 << 20
"""Largest response, and largest message of a streamed response: a page of 500 values of 96 KiB."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds and tries after which a silent connection whose other end has vanished is an error."""


class Deadline:
    """A point in time by which something must be done, in any number of steps; on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """The remaining seconds; below 0 when it has passed."""
        return self._end - time.monotonic()

    def remaining_s(self) -> float:
        """Return the remaining seconds, more than 0. Raises: TimeoutError when none are left."""
        left_s = self.left_s
        if left_s <= 0:
            raise TimeoutError(f"no answer within {self.seconds:.1f} s")
        return left_s

    def part(self, seconds: float) -> Deadline:
        """Return a deadline `seconds` from now, or this one's end if that is sooner."""
        return Deadline(min(seconds, max(self.left_s, 0.0)))


class EndpointRing:
    """The endpoints of a cluster in this client's order: those that have not failed come first, and of the others the
    one that failed longest ago. Safe to use from many threads.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = tuple(endpoints)
        self._lock = threading.Lock()
        self._clock = itertools.count(1)
        self._failed_at = dict.fromkeys(self._endpoints, 0)

    def __len__(self) -> int:
        return len(self._endpoints)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return self._endpoints

    def best(self) -> Endpoint:
        """Return the endpoint to ask now."""
        with self._lock:
            return min(self._endpoints, key=self._failed_at.__getitem__)

    def failed(self, endpoint: Endpoint) -> bool:
        """Put an endpoint last. Return whether it was in good standing before."""
        with self._lock:
            was_good = self._failed_at[endpoint] == 0
            self._failed_at[endpoint] = next(self._clock)
            return was_good

    def succeeded(self, endpoint: Endpoint) -> bool:
        """Restore an endpoint's good standing. Return whether it had failed before."""
        with self._lock:
            had_failed = self._failed_at[endpoint] != 0
            self._failed_at[endpoint] = 0
            return had_failed


class HttpExchange:
    """A POST and its response. Send `request`, then `feed` the bytes from the socket; it returns the body's."""

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
        """Take the next bytes, return those of the body among them. Raises: GarbageError."""
        body = bytearray()
        try:
            self._connection.receive_data(data)
            while self._take(self._connection.next_event(), body):
                pass
        except h11.RemoteProtocolError as error:
            raise GarbageError(f"the answer is not HTTP: {str(error)[:_SHOWN]}") from error
        if self.is_complete and (rest := self._connection.trailing_data[0]):
            raise GarbageError(f"bytes after the end of the answer: {rest[:40]!r}")
        return bytes(body)

    def end(self) -> None:
        """Handle the end of the connection. Raises: GarbageError when the response was not complete."""
        if self.is_complete:
            return
        try:
            self.feed(b"")
        except GarbageError as error:
            where = "in the middle of" if self.status or self._connection.trailing_data[0] else "without"
            raise GarbageError(f"the connection was closed {where} an answer") from error

    def _take(self, event: object, body: bytearray) -> bool:
        """Take one event; return whether there may be another. Raises: GarbageError."""
        match event:
            case h11.Data():
                body += event.data
            case h11.InformationalResponse():
                self._num_interim += 1
                if self._num_interim > _MAX_INTERIM:
                    raise GarbageError(f"more than {_MAX_INTERIM} interim answers, the last with {event.status_code}")
            case h11.Response():
                self.status = event.status_code
                self.headers = event.headers
            case h11.EndOfMessage():
                self.is_complete = True
            case _:  # more bytes are needed, or the connection is over
                return False
        return True


class EtcdConnection:
    """An open connection. Raises: OSError (which includes TimeoutError and ssl.SSLError) or GarbageError."""

    def __init__(self, endpoint: Endpoint, context: ssl.SSLContext | None, deadline: Deadline) -> None:
        self.endpoint = endpoint
        plain = _connect(endpoint, deadline)
        try:
            if not endpoint.path:
                _keep_alive(plain)
            plain.settimeout(deadline.remaining_s())
            self._socket = plain if context is None else _encrypted(plain, context, endpoint)
        except BaseException:
            plain.close()
            raise

    def send(self, request: bytes, deadline: Deadline) -> None:
        """Send a whole request."""
        self._socket.settimeout(deadline.remaining_s())
        self._socket.sendall(request)

    def receive(self, timeout_s: float) -> bytes:
        """Return what has arrived, b"" at the end. Raises: TimeoutError; then reading may continue."""
        self._socket.settimeout(timeout_s)
        return self._socket.recv(_READ_BYTES)

    def read_response(self, exchange: HttpExchange, deadline: Deadline) -> bytes:
        """Read the whole response of an exchange whose request was sent; return its body."""
        body = bytearray()
        while not exchange.is_complete:
            data = self.receive(deadline.remaining_s())
            if not data:
                exchange.end()
                break
            body += exchange.feed(data)
            if len(body) > MAX_CONTENT_BYTES:
                raise GarbageError(f"the answer is longer than {MAX_CONTENT_BYTES >> 20} MiB")
        return bytes(body)

    def is_quiet(self) -> bool:
        """Return whether the idle connection is still usable: the server has not closed it or sent anything
        unrequested.
        """
        try:
            self._socket.settimeout(0.0)
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def interrupt(self) -> None:
        """Wake the thread that waits for this connection, from another thread; it gets the end of the connection."""
        with suppress(OSError):
            # the plain socket's: TLS would first remove the state that the reader uses
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


def _encrypted(plain: socket.socket, context: ssl.SSLContext, endpoint: Endpoint) -> ssl.SSLSocket:
    try:
        return context.wrap_socket(plain, server_hostname=endpoint.host)
    except ConnectionError as error:
        # some servers close a connection that they cannot read, others reset it
        raise ConnectionError(f"in the TLS handshake: {error.strerror}") from error


def _keep_alive(plain: socket.socket) -> None:
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _connect(endpoint: Endpoint, deadline: Deadline) -> socket.socket:
    if endpoint.path:
        return _connect_socket(endpoint.path, deadline)
    addresses = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    failure: OSError | None = None
    for number, (family, kind, protocol, _, address) in enumerate(addresses):
        one = socket.socket(family, kind, protocol)
        try:
            # an equal part of the time for each address, all that is left for the last
            one.settimeout(deadline.remaining_s() / (len(addresses) - number))
            one.connect(address)
        except OSError as error:
            one.close()
            failure = error
        else:
            return one
    if failure is None:
        raise OSError(f"{endpoint.host} has no address")
    raise failure


def _connect_socket(path: str, deadline: Deadline) -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    try:
        one.settimeout(deadline.remaining_s())
        one.connect(path)
    except BaseException:
        one.close()
        raise
    return one


class JsonStream:
    """A streamed response: one JSON object per line, wherever packets begin and end.

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
        """Send the request and wait for the first message. Raises: OSError, GarbageError, GatewayError."""
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
            if not self._receive(deadline):
                raise GarbageError("the stream ended before its first message")

    def next(self, silence_s: float) -> JsonObject | None:
        """Return the next message, or None if none was complete in that time.

        Raises: OSError or GarbageError when the stream has ended or broken, GatewayError when etcd ends it with an
        error.
        """
        deadline = Deadline(silence_s)
        while not self._lines:
            try:
                is_open = self._receive(deadline)
            except TimeoutError:
                return None
            if not is_open and not self._lines:
                raise GarbageError("the stream ended")
        return unwrap(parse_object(self._lines.popleft()))

    def interrupt(self) -> None:
        """End the stream for its reader."""
        self._connection.interrupt()

    def close(self) -> None:
        self._on_close(self)
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, deadline: Deadline) -> bool:
        """Take arrived bytes; return whether more may follow. A line that is cut off never counts."""
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
            raise GarbageError(f"a message is longer than {MAX_CONTENT_BYTES >> 20} MiB")
        return not self._exchange.is_complete
