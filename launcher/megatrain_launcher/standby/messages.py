"""The messages between an executor and its standby server: a length, then JSON, over a socket pair.

The socket pair has no name, so no other process can connect. A worker's output descriptor is sent with the length of
the START message.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_LENGTH: Final = struct.Struct("<I")

START: Final = "start"
SIGNAL: Final = "signal"
KILL: Final = "kill"

READY: Final = "ready"
STARTED: Final = "started"
REFUSED: Final = "refused"
ENDED: Final = "ended"
KILLED: Final = "killed"
GONE: Final = "gone"

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """A worker to start: `python -m module arguments` in a directory, with exactly this environment."""

    rank: int
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str

    def to_message(self) -> Message:
        return {
            "kind": START,
            "rank": self.rank,
            "module": self.module,
            "arguments": list(self.arguments),
            "environment": dict(self.environment),
            "directory": self.directory,
        }

    @classmethod
    def from_message(cls, message: Message) -> WorkerStart:
        return cls(
            rank=message["rank"],
            module=message["module"],
            arguments=tuple(message["arguments"]),
            environment=message["environment"],
            directory=message["directory"],
        )


def send_message(channel: socket.socket, message: Message, descriptor: int | None = None) -> None:
    """Send a message, with a copy of an open file descriptor if one is given.

    Raises: OSError when the other side is gone.
    """
    # ASCII JSON escapes the surrogates that represent non-UTF-8 bytes of the environment
    payload = json.dumps(message).encode("ascii")
    length = _LENGTH.pack(len(payload))
    if descriptor is None:
        channel.sendall(length + payload)
        return
    # the kernel sends a message of this few bytes completely or not at all
    socket.send_fds(channel, [length], [descriptor])
    channel.sendall(payload)


def receive_message(channel: socket.socket) -> tuple[Message, int | None] | None:
    """Wait for a message and return it with the descriptor sent with it; None when the other side is gone."""
    descriptors: list[int] = []
    length = b""
    while len(length) < _LENGTH.size:
        try:
            chunk, found, _, _ = socket.recv_fds(channel, _LENGTH.size - len(length), 1)
        except ConnectionError:
            chunk, found = b"", []
        descriptors += found
        if not chunk:
            _close_all(descriptors)
            return None
        length += chunk
    payload = _receive_exactly(channel, _LENGTH.unpack(length)[0])
    if payload is None:
        _close_all(descriptors)
        return None
    return json.loads(payload), descriptors[0] if descriptors else None


def _receive_exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    parts: list[bytes] = []
    while num_bytes:
        try:
            part = channel.recv(min(num_bytes, 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
