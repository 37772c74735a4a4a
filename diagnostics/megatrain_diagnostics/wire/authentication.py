"""Who may stream: whoever knows the token in the daemon's record proves it, and so does the daemon; it is never sent.

Flight's handshake carries three messages of ours: the host's greeting with a nonce; the daemon's nonce and proof; the
host's proof. A proof is an HMAC of both nonces, the role, and who the host says it is. The host then gets a ticket,
random and good for this daemon's life, that goes with each call (DESIGN decision 21).
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow.flight as flight

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.record import decode, encode

_NONCE_BYTES = 32
_MAX_TICKETS = 20_000
_MAX_MESSAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SenderName:
    """One life of a host's sender."""

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


class HostAuthentication(flight.ClientAuthHandler):  # type: ignore[misc] # pyarrow has no types
    """The host's side. Raises from the handshake: FlightUnauthenticatedError when either side has a wrong token."""

    def __init__(self, name: SenderName, token: str) -> None:
        super().__init__()
        self._name, self._token = name, token
        self._ticket = b""

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        greeting = _Greeting(self._name.host, self._name.session, secrets.token_hex(_NONCE_BYTES))
        outgoing.write(encode(greeting))
        challenge = _read(_Challenge, incoming, "the daemon's challenge")
        if not hmac.compare_digest(challenge.proof, _proof(self._token, "daemon", greeting, challenge.nonce)):
            raise flight.FlightUnauthenticatedError("whoever listens there does not know the token of the job's daemon")
        outgoing.write(encode(_Answer(_proof(self._token, "host", greeting, challenge.nonce))))
        self._ticket = bytes(incoming.read())

    def get_token(self) -> bytes:
        return self._ticket


class DaemonAuthentication(flight.ServerAuthHandler):  # type: ignore[misc] # pyarrow has no types
    """The daemon's side. `on_refusal` is called with a sentence for each handshake that fails."""

    def __init__(self, token: str, on_refusal: Callable[[str], None]) -> None:
        super().__init__()
        self._token, self._on_refusal = token, on_refusal
        self._lock = threading.Lock()
        self._tickets: OrderedDict[bytes, SenderName] = OrderedDict()

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        try:
            greeting = _read(_Greeting, incoming, "a host's greeting")
            nonce = secrets.token_hex(_NONCE_BYTES)
            outgoing.write(encode(_Challenge(nonce, _proof(self._token, "daemon", greeting, nonce))))
            answer = _read(_Answer, incoming, f"the proof of host {greeting.host!r}")
        except flight.FlightUnauthenticatedError as error:
            self._on_refusal(str(error))
            raise
        if not hmac.compare_digest(answer.proof, _proof(self._token, "host", greeting, nonce)):
            reason = f"host {greeting.host!r} has another token than this daemon, which is in etcd, in its record"
            self._on_refusal(reason)
            raise flight.FlightUnauthenticatedError(reason)
        ticket = secrets.token_bytes(_NONCE_BYTES)
        with self._lock:
            self._tickets[ticket] = SenderName(greeting.host, greeting.session)
            while len(self._tickets) > _MAX_TICKETS:
                self._tickets.popitem(last=False)
        outgoing.write(ticket)

    def is_valid(self, token: bytes) -> bytes:
        with self._lock:
            name = self._tickets.get(bytes(token))
        if name is None:
            raise flight.FlightUnauthenticatedError("a call without a ticket of this daemon: make the handshake first")
        return encode(name)


def peer_of(identity: bytes) -> SenderName:
    """Return who calls, of the identity that Flight keeps with a call."""
    return decode(SenderName, identity, "identity of a caller")


def _proof(token: str, role: str, greeting: _Greeting, nonce: str) -> str:
    said = "\n".join((role, greeting.host.encode().hex(), greeting.session.encode().hex(), greeting.nonce, nonce))
    return hmac.digest(token.encode(), said.encode(), "sha256").hex()


def _read(kind: type[Any], incoming: Any, what: str) -> Any:
    """Return the next message of a handshake. Raises: FlightUnauthenticatedError."""
    try:
        raw = bytes(incoming.read())
        if len(raw) > _MAX_MESSAGE_BYTES:
            raise flight.FlightUnauthenticatedError(f"{what}: {len(raw)} bytes, more than {_MAX_MESSAGE_BYTES}")
        return decode(kind, raw, what)
    except (CoordinationError, flight.FlightInternalError) as error:
        raise flight.FlightUnauthenticatedError(f"{what}: {error}") from error
