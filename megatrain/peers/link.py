"""Transfers between two programs of a job in parallel with training, such as snapshots and pictures: plain TCP.

This module uses no process groups, which belong to the main thread and to training. The two sides authenticate each
other by a common secret before they read anything else, so a connection from another program occupies a thread for
at most `PeerLimits.authentication_s`. A running HMAC in each direction covers all data after that and detects changed
bytes. Like the data of NCCL, it is not encrypted. Every call has a time limit, every connection has a deadline, and
this module buffers nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import CommunicationError

SECRET_BYTES = 32
MAX_MESSAGE_BYTES = 4096
"""A message is a JSON object or a short text after a length prefix. Larger data is sent as raw bytes without one."""
_HELLO = b"MTPEER1\n"
_LARGEST_PORT = 65535
_NONCE_BYTES = 32
_TAG_BYTES = 32
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Time limits: for a connection and its authentication, for one call, and for the whole connection."""

    authentication_s: float
    call_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a program listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "HOST:PORT"; an IPv6 host may be in brackets. Raises: ValueError with the text."""
        host, _, port = text.rpartition(":")
        if not host or not (port.isascii() and port.isdecimal()) or not 1 <= int(port) <= _LARGEST_PORT:
            raise ValueError(text)
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PeerConnection(Closable):
    """A connection of two programs. After `authenticate`, each has proved that it has the same secret.

    Raises: CommunicationError naming the peer, from every method.
    """

    def __init__(self, connected: socket.socket, location: str, limits: PeerLimits) -> None:
        self.location = location
        self._socket = connected
        self._limits = limits
        self._deadline = time.monotonic() + limits.authentication_s
        self._sent: Any = None
        self._received: Any = None

    def authenticate(self, secret: bytes, *, is_server: bool) -> None:
        """Prove that this side has the secret, and check that the other side has it. The server sends first."""
        with suppress(OSError):  # a socket that is not TCP has no such option
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours = secrets.token_bytes(_NONCE_BYTES)
        if is_server:
            self._send(_HELLO + ours)
            theirs, tag = self._take(_NONCE_BYTES), self._take(_TAG_BYTES)
            self._compare(tag, _mac(secret, b"client", ours, theirs))
            self._send(_mac(secret, b"server", ours, theirs))
            nonces = (ours, theirs)
        else:
            if self._take(len(_HELLO)) != _HELLO:
                raise CommunicationError(f"{self.location}: the program that listens there is not a megatrain program")
            theirs = self._take(_NONCE_BYTES)
            self._send(ours + _mac(secret, b"client", theirs, ours))
            self._compare(self._take(_TAG_BYTES), _mac(secret, b"server", theirs, ours))
            nonces = (theirs, ours)
        keys = [_mac(secret, direction, *nonces) for direction in (b"server to client", b"client to server")]
        self._sent, self._received = (
            hmac.new(key, digestmod=hashlib.sha256) for key in keys[:: 1 if is_server else -1]
        )
        self._deadline = time.monotonic() + self._limits.total_s

    def send(self, data: bytes | memoryview) -> None:
        """Send bytes without a length prefix. The receiver may use them once it has checked a later tag."""
        self._send(data)
        self._sent.update(data)

    def send_tag(self) -> None:
        """Send the HMAC of everything that was sent so far."""
        self._send(self._sent.digest())

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`. The caller may use the bytes once `check_tag` has passed."""
        self._fill(view)
        self._received.update(view)

    def check_tag(self) -> None:
        """Receive the peer's HMAC, and check that everything received so far is what the peer sent."""
        self._compare(self._take(_TAG_BYTES), self._received.digest())

    def send_message(self, message: bytes) -> None:
        """Send a short message."""
        assert len(message) <= MAX_MESSAGE_BYTES
        self.send(_LENGTH.pack(len(message)) + message)
        self.send_tag()

    def receive_message(self) -> bytes:
        """Return the next short message."""
        head = bytearray(_LENGTH.size)
        self.receive_into(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise CommunicationError(
                f"{self.location}: the peer announces a message of {length} bytes; the limit is {MAX_MESSAGE_BYTES}"
            )
        message = bytearray(length)
        self.receive_into(memoryview(message))
        self.check_tag()
        return bytes(message)

    def cut(self) -> None:
        """Shut the connection down, so that a thread that waits on it fails at once."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self._limit_call()
            self._socket.sendall(data)
        except OSError as error:
            raise self._failure(error) from error

    def _take(self, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                self._limit_call()
                num_bytes = self._socket.recv_into(view[done:])
            except OSError as error:
                raise self._failure(error) from error
            if num_bytes == 0:
                raise CommunicationError(f"{self.location}: the peer closed the connection")
            done += num_bytes

    def _limit_call(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("too slow: the time limit of the whole connection has passed")
        self._socket.settimeout(min(left_s, self._limits.call_s))

    def _compare(self, found: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(found, expected):
            raise CommunicationError(
                f"{self.location}: the peer does not have the same secret, or its bytes were changed"
            )

    def _failure(self, error: OSError) -> CommunicationError:
        return CommunicationError(f"{self.location}: {error.strerror or error}")


def connect_peer(
    address: PeerAddress,
    secret: bytes,
    limits: PeerLimits,
    has_connected: Callable[[PeerConnection], None] = lambda connection: None,
) -> PeerConnection:
    """Return a connection to the program that listens at `address`.

    has_connected: gets the connection before the other side has proved anything, to cut it if it is no longer needed.
    Raises: CommunicationError naming the address.
    """
    try:
        connected = socket.create_connection((address.host, address.port), limits.authentication_s)
    except OSError as error:
        raise CommunicationError(f"{address}: cannot be reached: {error.strerror or error}") from error
    connection = PeerConnection(connected, str(address), limits)
    try:
        has_connected(connection)
        connection.authenticate(secret, is_server=False)
    except BaseException:
        connection.close()
        raise
    return connection


def _mac(secret: bytes, role: bytes, of_server: bytes, of_client: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + of_server + of_client, hashlib.sha256)
