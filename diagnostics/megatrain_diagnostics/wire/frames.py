"""The event stream on a TCP connection: frames that start with their length, so that the receiver can limit memory.

A frame has its kind and the lengths of its header and content (17 bytes, little endian), then header and content. A
header is empty or one JSON value, of at most 4,096 bytes; only batches have content, the bytes of an Arrow IPC stream.
Content that is longer than the receiver's limit is read and discarded without being kept in memory.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

import pyarrow as pa

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.record import decode, encode

MAX_HEADER_BYTES = 4096
_START = struct.Struct("<BQQ")
_NOTHING = pa.py_buffer(b"")
_DRAINED_BYTES = 1 << 16
_TIME = struct.Struct("@ll")


class FrameKind(IntEnum):
    """The kind of a frame. The meaning of a number never changes."""

    HANDSHAKE = 1
    REFUSAL = 2
    """The last frame of a connection, with the reason why it is closed."""
    BATCH = 3
    ACKNOWLEDGMENT = 4
    CLOCK = 5
    END = 6
    """The host sends no more batches."""


class WireError(ConnectionError):
    """The connection can no longer be used; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A received frame. `content` is None when it was longer than the receiver's limit."""

    kind: FrameKind
    header: bytes
    content: pa.Buffer | None


@dataclass(frozen=True, slots=True)
class _Refusal:
    reason: str


class FrameSocket:
    """A connection. One thread receives, any thread may send. Raises: WireError, and other OSErrors of sockets."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(True)
        self._socket = connected
        self._sending = threading.Lock()

    def limit_silence(self, *, receive_s: float | None = None, send_s: float | None = None) -> None:
        """Set the time after which receiving or sending without progress fails; 0: no limit; None: unchanged."""
        for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
            if seconds is not None:
                self._socket.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(int(seconds), 0))

    def send(self, kind: FrameKind, header: bytes = b"", content: pa.Buffer = _NOTHING) -> None:
        """Send a frame. Blocks while the other side does not read."""
        if len(header) > MAX_HEADER_BYTES:
            raise WireError(f"a header of {len(header)} bytes cannot be sent; at most {MAX_HEADER_BYTES} are allowed")
        with self._sending:
            self._socket.sendall(_START.pack(kind, len(header), content.size) + header)
            if content.size:
                self._socket.sendall(content)

    def refuse(self, reason: str) -> None:
        """Send the reason why the connection is closed; errors of sending are ignored."""
        with suppress(OSError):
            self.send(FrameKind.REFUSAL, encode(_Refusal(reason[:1000])))

    def receive(self, most_content: int = 0) -> Frame | None:
        """Return the next frame; None: the other side has closed the connection between two frames.

        Raises: WireError for an invalid frame, for the other side's refusal, and when it is silent for too long.
        """
        start = self._read(_START.size, may_end=True)
        if not start:
            return None
        number, header_bytes, content_bytes = _START.unpack(start)
        if number not in tuple(FrameKind) or header_bytes > MAX_HEADER_BYTES:
            raise WireError(
                f"not a frame: kind {number}, a header of {header_bytes} bytes (at most {MAX_HEADER_BYTES})"
            )
        kind = FrameKind(number)
        if content_bytes and not (most_content and kind is FrameKind.BATCH):
            raise WireError(
                f"received {content_bytes} bytes of content in a {kind.name} frame; only batches of an authenticated "
                "sender have content"
            )
        header = bytes(self._read(header_bytes))
        if kind is FrameKind.REFUSAL:
            raise WireError(_reason(header))
        if content_bytes > most_content:
            self._drain(content_bytes)
            return Frame(kind, header, None)
        return Frame(kind, header, self._read(content_bytes) if content_bytes else _NOTHING)

    def shut(self) -> None:
        """End the connection now, from any thread: pending receives and sends fail or see the end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. No other thread may use it any more."""
        self.shut()
        self._socket.close()

    def _read(self, num_bytes: int, *, may_end: bool = False) -> pa.Buffer:
        buffer = pa.allocate_buffer(num_bytes)
        with memoryview(buffer) as view:
            done = 0
            while done < num_bytes:
                count = self._received(view[done:])
                if not count and may_end and not done:
                    return _NOTHING
                if not count:
                    raise WireError("the connection was lost")
                done += count
        return buffer

    def _drain(self, num_bytes: int) -> None:
        nowhere = memoryview(bytearray(_DRAINED_BYTES))
        while num_bytes:
            count = self._received(nowhere[: min(num_bytes, _DRAINED_BYTES)])
            if not count:
                raise WireError("the connection was lost")
            num_bytes -= count

    def _received(self, view: memoryview) -> int:
        try:
            return self._socket.recv_into(view)
        except BlockingIOError as error:
            raise WireError("the other side was silent for too long") from error


def _reason(header: bytes) -> str:
    try:
        return decode(_Refusal, header, "a refusal").reason
    except CoordinationError:
        return "the other side refused; its reason cannot be read"
