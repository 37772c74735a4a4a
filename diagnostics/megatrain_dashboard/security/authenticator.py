"""Authenticates callers by the headers and the address of a request. It keeps only wrong tokens and ended sessions.

These are tried in order: the headers of a trusted proxy, a bearer token, a session (cookie and page secret); where the
page is open, the caller is anonymous. A wrong token is refused even if the session is valid. Proxy headers from other
addresses are ignored.
"""

from __future__ import annotations

import hmac
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from ipaddress import ip_address

from megatrain.contracts.network_address import is_loopback
from megatrain_dashboard.responses.errors import RefusalError, too_many
from megatrain_dashboard.security.roles import Caller, Proof, Role
from megatrain_dashboard.security.sessions import PAGE_SECRET_HEADER, Sessions
from megatrain_dashboard.settings import DashboardSettings

_MAX_NAME_CHARACTERS = 128
_BEARER_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="megatrain"'}
_WINDOW_S = 60.0
_MAX_ADDRESSES = 4096
"""Beyond this number the oldest addresses are dropped, so that memory stays bounded."""


class Authenticator:
    """Authenticates callers according to the settings."""

    def __init__(self, settings: DashboardSettings, attempts: Attempts) -> None:
        self._settings, self._attempts = settings, attempts
        self.sessions = Sessions(settings)

    def caller(self, headers: Mapping[str, str], address: str, now_s: float) -> Caller:
        """Return the caller.

        Raises: RefusalError: 401; 429 after too many wrong tokens; 400 or 403 for a wrong user or role of a proxy.
        """
        found = self.known_caller(headers, address, now_s)
        if found is not None:
            return found
        if self._settings.is_open:
            return Caller("local", Role.VIEWER, Proof.NOTHING, address)
        text = "not logged in: log in with a token, or send one: Authorization: Bearer TOKEN"
        raise RefusalError(401, text, headers=_BEARER_CHALLENGE)

    def known_caller(self, headers: Mapping[str, str], address: str, now_s: float) -> Caller | None:
        """Return the caller if the request identifies one; else None.

        Raises: RefusalError for a wrong token, or for a wrong user or role of a proxy.
        """
        if self.is_from_proxy(address) and headers.get(self._settings.user_header):
            return self._caller_of_proxy(headers, address)
        if "authorization" in headers:
            scheme, _, token = headers["authorization"].partition(" ")
            if scheme.lower() == "bearer":
                role = self.role_of_token(token.strip(), address, now_s)
                return Caller(f"token-{role}", role, Proof.TOKEN, address)
        secret = headers.get(PAGE_SECRET_HEADER, "")
        session = self.sessions.session_of(headers.get("cookie", ""), secret, now_s)
        return Caller(session.user, session.role, Proof.SESSION, address) if session is not None else None

    def role_of_token(self, token: str, address: str, now_s: float) -> Role:
        """Return the role that a token has. Raises: RefusalError: 401, or 429 after too many wrong tokens."""
        # where many callers share one address, one that guesses tokens must not lock out the others
        is_shared = is_loopback(address) or self.is_from_proxy(address)
        wait_s = 0.0 if is_shared else self._attempts.wait_s(address, now_s)
        if wait_s > 0:
            raise too_many(f"too many wrong tokens from {address}; wait", retry_after_s=round(wait_s) + 1)
        given = _digest(token)
        # both comparisons always run, so that the time reveals nothing
        is_operator = hmac.compare_digest(given, _digest(self._settings.operator_token))
        is_viewer = hmac.compare_digest(given, _digest(self._settings.viewer_token))
        if token and is_operator:
            return Role.OPERATOR
        if token and is_viewer:
            return Role.VIEWER
        self._attempts.count_wrong(address, now_s)
        raise RefusalError(401, "this is not a token of this dashboard", headers=_BEARER_CHALLENGE)

    def is_from_proxy(self, address: str) -> bool:
        """Return whether a connection comes from a trusted proxy."""
        try:
            place = ip_address(address.partition("%")[0])
        except ValueError:
            return False
        place = getattr(place, "ipv4_mapped", None) or place
        return any(place in network for network in self._settings.trusted_proxies)

    def _caller_of_proxy(self, headers: Mapping[str, str], address: str) -> Caller:
        user = headers[self._settings.user_header]
        if len(user) > _MAX_NAME_CHARACTERS or not user.isprintable():
            raise RefusalError(
                400, f"{self._settings.user_header}: at most {_MAX_NAME_CHARACTERS} printable characters"
            )
        role = headers.get(self._settings.role_header, "") if self._settings.role_header else ""
        if role.lower() not in ("", *Role):
            raise RefusalError(403, f"{self._settings.role_header}={role[:40]!r}: expected viewer or operator")
        return Caller(user, Role(role.lower() or Role.VIEWER), Proof.PROXY, address)


def _digest(token: str) -> bytes:
    """Return a digest of a token for comparisons. All digests have the same length."""
    return hmac.digest(b"megatrain dashboard token", token.encode(errors="replace"), "sha256")


class Attempts:
    """Counts wrong tokens by address: each address has a few attempts a minute. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_s(self, address: str, now_s: float) -> float:
        """Return how long an address must wait before its next token is checked; 0: not at all."""
        with self._lock:
            times = self._wrong.get(address)
            while times and times[0] <= now_s - _WINDOW_S:
                times.popleft()
            return times[0] + _WINDOW_S - now_s if times and len(times) >= self._most else 0.0

    def count_wrong(self, address: str, now_s: float) -> None:
        """Count a wrong token."""
        with self._lock:
            self._wrong.setdefault(address, deque(maxlen=self._most)).append(now_s)
            self._wrong.move_to_end(address)
            if len(self._wrong) > _MAX_ADDRESSES:
                self._wrong.popitem(last=False)
