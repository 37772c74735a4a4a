"""Connections to the members of etcd: deadlines, the order of endpoints, sending and receiving.

A connection is TCP or a unix socket, with or without TLS. Every step has an absolute deadline, except name resolution,
which the system limits.
"""

from __future__ import annotations

import itertools
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from megatrain_job.coordination.errors import InvalidResponseError
from megatrain_job.coordination.http_exchange import HttpExchange
from megatrain_job.coordination.settings import Endpoint

_READ_BYTES = 1 << 16
MAX_CONTENT_BYTES = 64 << 20
"""Largest response, and largest message of a streamed response: a page of 500 values of 96 KiB."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""TCP keepalive: seconds and tries after which a connection with a vanished peer fails."""


class Deadline:
    """A point on the monotonic clock by which an operation of several steps must be done."""

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
    """The endpoints of a cluster in this client's order: first those that have not failed, then the others, ordered by
    the time of their last failure. Safe to use from many threads.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = tuple(endpoints)
        self._lock = threading.Lock()
        self._clock = itertools.count(1)
        self._failed_at = dict.fromkeys(self._endpoints, 0)

    def __len__(self) -> int:
        return len(self._endpoints)

    def best(self) -> Endpoint:
        """Return the endpoint for the next request."""
        with self._lock:
            return min(self._endpoints, key=self._failed_at.__getitem__)

    def failed(self, endpoint: Endpoint) -> bool:
        """Put an endpoint last. Return whether it had not failed before."""
        with self._lock:
            was_good = self._failed_at[endpoint] == 0
            self._failed_at[endpoint] = next(self._clock)
            return was_good

    def succeeded(self, endpoint: Endpoint) -> bool:
        """Put an endpoint among those that have not failed. Return whether it had failed before."""
        with self._lock:
            had_failed = self._failed_at[endpoint] != 0
            self._failed_at[endpoint] = 0
            return had_failed


class EtcdConnection:
    """An open connection. Raises: OSError (which includes TimeoutError and ssl.SSLError) or InvalidResponseError."""

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
        """Send a request."""
        self._socket.settimeout(deadline.remaining_s())
        self._socket.sendall(request)

    def receive(self, timeout_s: float) -> bytes:
        """Return the bytes that have arrived; b"" at the end. Raises: TimeoutError; a later call can continue."""
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
                raise InvalidResponseError(f"the answer is longer than {MAX_CONTENT_BYTES >> 20} MiB")
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
        """Wake the thread that reads from this connection; any thread may call it. The reader then finds it closed."""
        with suppress(OSError):
            # shut down the plain socket: the method of SSLSocket would first drop the TLS state that the reader uses
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
        sock = socket.socket(family, kind, protocol)
        try:
            # an equal part of the time for each address, all that is left for the last
            sock.settimeout(deadline.remaining_s() / (len(addresses) - number))
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    if failure is None:
        raise OSError(f"{endpoint.host} has no address")
    raise failure


def _connect_socket(path: str, deadline: Deadline) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(deadline.remaining_s())
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def failure_text(error: Exception) -> str:
    """Return why a try failed, in a short text, because one message may contain the reasons of three endpoints."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return str(error) if str(error) not in ("", "timed out") else "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
