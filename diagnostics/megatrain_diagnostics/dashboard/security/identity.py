"""Finding out who asks, from the headers of a request and the address it comes from. Pure but for the attempts counted.

In this order: a trusted proxy's word, a bearer token, a session's cookie; and where the page is open, nobody in
particular. A wrong token is refused even beside a good cookie. Headers of proxies mean nothing from anywhere else.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from ipaddress import ip_address

from megatrain.contracts.addresses import is_loopback
from megatrain_diagnostics.dashboard.answers.errors import RefusalError, too_many
from megatrain_diagnostics.dashboard.security.attempts import Attempts
from megatrain_diagnostics.dashboard.security.roles import Caller, Proof, Role
from megatrain_diagnostics.dashboard.security.sessions import Sessions
from megatrain_diagnostics.dashboard.settings import DashboardSettings

_MOST_NAME_CHARACTERS = 128
_WAY_IN = {"WWW-Authenticate": 'Bearer realm="megatrain"'}


class Identity:
    """Knows callers by what `settings` say."""

    def __init__(self, settings: DashboardSettings, attempts: Attempts) -> None:
        self._settings, self._attempts = settings, attempts
        self.sessions = Sessions(settings)

    def caller(self, headers: Mapping[str, str], address: str, now_s: float) -> Caller:
        """Return who asks. Raises: RefusalError (401, or 429 after too many wrong tokens)."""
        found = self.known_caller(headers, address, now_s)
        if found is not None:
            return found
        if self._settings.is_open:
            return Caller("local", Role.VIEWER, Proof.NOTHING, address)
        raise RefusalError(
            401, "who asks? Log in with a token, or send one: Authorization: Bearer TOKEN", headers=_WAY_IN
        )

    def known_caller(self, headers: Mapping[str, str], address: str, now_s: float) -> Caller | None:
        """Return who asks if anything says so. Raises: RefusalError for a token that is wrong."""
        if self.is_from_proxy(address) and headers.get(self._settings.user_header):
            return self._caller_of_proxy(headers, address)
        if "authorization" in headers:
            scheme, _, token = headers["authorization"].partition(" ")
            if scheme.lower() == "bearer":
                role = self.role_of_token(token.strip(), address, now_s)
                return Caller(f"token-{role}", role, Proof.TOKEN, address)
        session = self.sessions.session_of(headers.get("cookie", ""), now_s)
        return Caller(session.user, session.role, Proof.SESSION, address) if session is not None else None

    def role_of_token(self, token: str, address: str, now_s: float) -> Role:
        """Return the role that a token has. Raises: RefusalError, 429 where too many were wrong lately."""
        # where many come from one address, one who guesses must not keep the others out
        is_shared = is_loopback(address) or self.is_from_proxy(address)
        wait_s = 0.0 if is_shared else self._attempts.wait_s(address, now_s)
        if wait_s > 0:
            raise too_many(f"too many wrong tokens from {address}; wait", retry_after_s=round(wait_s) + 1)
        given = _digest(token)
        # both are always compared, so that the time reveals nothing
        is_operator = hmac.compare_digest(given, _digest(self._settings.operator_token))
        is_viewer = hmac.compare_digest(given, _digest(self._settings.viewer_token))
        if token and is_operator:
            return Role.OPERATOR
        if token and is_viewer:
            return Role.VIEWER
        self._attempts.note_wrong(address, now_s)
        raise RefusalError(401, "this is not a token of this dashboard", headers=_WAY_IN)

    def is_from_proxy(self, address: str) -> bool:
        """Say whether a connection comes from a trusted proxy."""
        try:
            place = ip_address(address.partition("%")[0])
        except ValueError:
            return False
        place = getattr(place, "ipv4_mapped", None) or place
        return any(place in network for network in self._settings.trusted_proxies)

    def _caller_of_proxy(self, headers: Mapping[str, str], address: str) -> Caller:
        user = headers[self._settings.user_header]
        if len(user) > _MOST_NAME_CHARACTERS or not user.isprintable():
            raise RefusalError(
                400, f"{self._settings.user_header}: at most {_MOST_NAME_CHARACTERS} printable characters"
            )
        told = headers.get(self._settings.role_header, "") if self._settings.role_header else ""
        if told.lower() not in ("", *Role):
            raise RefusalError(403, f"{self._settings.role_header}={told[:40]!r}: viewer and operator are known here")
        return Caller(user, Role(told.lower() or Role.VIEWER), Proof.PROXY, address)


def _digest(token: str) -> bytes:
    """Return what stands for a token where two are compared: of one length."""
    return hmac.digest(b"megatrain dashboard token", token.encode(errors="replace"), "sha256")
