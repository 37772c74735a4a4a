"""Authenticates a stream: host and daemon prove to each other that they have the token in the daemon's record.

The token is never sent. There are four frames: the host's greeting with a nonce; the daemon's nonce and proof; the
host's proof; the daemon's welcome. A proof is an HMAC of both nonces, the role, and the host's name and session.
Afterwards the connection identifies the sender.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Any

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.record import decode, encode
from megatrain_diagnostics.wire.frames import FrameKind, FrameSocket, WireError

_NONCE_BYTES = 32


@dataclass(frozen=True, slots=True)
class SenderName:
    """The host name of a sender, and the session, which identifies one sender process."""

    host: str
    session: str


@dataclass(frozen=True, slots=True)
class _Greeting:
    host: str
    session: str
    nonce: str


@dataclass(frozen=True, slots=True)
class _Challenge:
    nonce: str
    proof: str


@dataclass(frozen=True, slots=True)
class _Answer:
    proof: str


def authenticate_to_daemon(connection: FrameSocket, name: SenderName, token: str) -> None:
    """Authenticate on the host's side. Raises: WireError when the tokens differ; OSError."""
    greeting = _Greeting(name.host, name.session, secrets.token_hex(_NONCE_BYTES))
    connection.send(FrameKind.HANDSHAKE, encode(greeting))
    challenge = _read(_Challenge, connection, "the daemon's challenge")
    if not _is_same(challenge.proof, _proof(token, "daemon", greeting, challenge.nonce)):
        raise WireError("the process at this address does not have the token of the job's daemon")
    connection.send(FrameKind.HANDSHAKE, encode(_Answer(_proof(token, "host", greeting, challenge.nonce))))
    _handshake(connection, "the daemon's welcome")


def authenticate_sender(connection: FrameSocket, token: str) -> SenderName:
    """Authenticate on the daemon's side; return the sender. Raises: WireError when the tokens differ; OSError."""
    greeting = _read(_Greeting, connection, "a host's greeting")
    nonce = secrets.token_hex(_NONCE_BYTES)
    connection.send(FrameKind.HANDSHAKE, encode(_Challenge(nonce, _proof(token, "daemon", greeting, nonce))))
    answer = _read(_Answer, connection, f"the proof of host {greeting.host!r}")
    if not _is_same(answer.proof, _proof(token, "host", greeting, nonce)):
        raise WireError(
            f"host {greeting.host!r} has another token than this daemon; the valid one is in this daemon's etcd record"
        )
    connection.send(FrameKind.HANDSHAKE)
    return SenderName(greeting.host, greeting.session)


def _proof(token: str, role: str, greeting: _Greeting, nonce: str) -> str:
    message = "\n".join((role, greeting.host.encode().hex(), greeting.session.encode().hex(), greeting.nonce, nonce))
    return hmac.digest(token.encode(), message.encode(), "sha256").hex()


def _is_same(given: str, proof: str) -> bool:
    return hmac.compare_digest(given.encode(), proof.encode())


def _read(kind: type[Any], connection: FrameSocket, what: str) -> Any:
    """Return the next message of a handshake. Raises: WireError, OSError."""
    try:
        return decode(kind, _handshake(connection, what), what)
    except CoordinationError as error:
        raise WireError(str(error)) from error


def _handshake(connection: FrameSocket, what: str) -> bytes:
    frame = connection.receive()
    if frame is None or frame.kind is not FrameKind.HANDSHAKE:
        raise WireError(
            f"expected {what}, received {'the end of the connection' if frame is None else frame.kind.name}"
        )
    return frame.header
