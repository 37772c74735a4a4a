"""Sessions of browsers: a signed cookie contains a role and an end time, and a page secret belongs to it. The server
stores only the sessions that were ended early.

A browser sends a cookie to every port of a host, so another server on that machine may get it. Therefore the cookie
alone does not authenticate: the page keeps the secret in storage that the browser separates by origin, port included,
and sends it in a header.

The signing key is derived from the token of the role, so a session survives a restart of the server and ends with its
token: changing the token file and restarting the dashboard ends all sessions. A restart with the same token ends none.
After it, a stolen copy of a cookie that a logout ended is valid again until its time is over.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from dataclasses import dataclass

from megatrain_dashboard.security.roles import Role
from megatrain_dashboard.settings import DashboardSettings

PAGE_SECRET_HEADER = "x-megatrain-session"

_VERSION = "2"
_MAX_COOKIES = 4
_MAX_ENDED = 4096
_NAME_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Session:
    """The content of a cookie. `user` is generated: "browser-1a2b3c4d" distinguishes logins in the audit."""

    role: Role
    user: str
    ends_unix_s: int


class Sessions:
    """Makes, checks and ends sessions. All methods run on one event loop."""

    def __init__(self, settings: DashboardSettings) -> None:
        self._name, self._path = settings.cookie_name, settings.base_path or "/"
        self._length_s = settings.session_s
        self._ended: OrderedDict[str, None] = OrderedDict()
        tokens = {Role.VIEWER: settings.viewer_token, Role.OPERATOR: settings.operator_token}
        self._keys = {
            role: hmac.digest(token.encode(), f"megatrain dashboard session, {role}".encode(), "sha256")
            for role, token in tokens.items()
            if token
        }

    def new_session(self, role: Role, now_s: float, *, is_secure: bool) -> tuple[str, str]:
        """Return the Set-Cookie header of a login, and its page secret. `is_secure`: the browser uses https."""
        ends_s = int(now_s + self._length_s)
        payload = f"{_VERSION}.{role}.{ends_s}.{secrets.token_hex(16)}"
        cookie = self._set_cookie(f"{payload}.{self._signature(role, payload)}", int(self._length_s), is_secure)
        return cookie, self._page_secret(role, payload)

    def end_session(self, cookie_header: str, page_secret: str, now_s: float, *, is_secure: bool) -> str:
        """Return the Set-Cookie header that removes a cookie. This process no longer accepts copies of the session."""
        for value in _cookie_values(cookie_header, self._name)[:_MAX_COOKIES]:
            if self._session(value, page_secret, now_s) is not None:
                self._ended[value] = None
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        return self._set_cookie("", 0, is_secure)

    def session_of(self, cookie_header: str, page_secret: str, now_s: float) -> Session | None:
        """Return the session of a Cookie header and a page secret; None where there is none, it is over, or forged.

        Another server of the same host name may have set a second cookie of the same name, so each one is checked.
        """
        values = _cookie_values(cookie_header, self._name)[:_MAX_COOKIES]
        return next(
            (found for value in values if (found := self._session(value, page_secret, now_s)) is not None), None
        )

    def _session(self, value: str, page_secret: str, now_s: float) -> Session | None:
        payload, _, signature = value.rpartition(".")
        parts = payload.split(".")
        if not value.isascii() or len(parts) != 4 or parts[0] != _VERSION or parts[1] not in tuple(Role):
            return None
        role = Role(parts[1])
        if role not in self._keys or not hmac.compare_digest(self._signature(role, payload), signature):
            return None
        if not page_secret.isascii() or not hmac.compare_digest(self._page_secret(role, payload), page_secret):
            return None
        if value in self._ended:
            return None
        ends_s = int(parts[2])  # cannot fail: the signature proves that this server wrote it
        return Session(role, f"browser-{parts[3][:_NAME_DIGITS]}", ends_s) if now_s < ends_s else None

    def _signature(self, role: Role, payload: str) -> str:
        return hmac.new(self._keys[role], payload.encode(), "sha256").hexdigest()

    def _page_secret(self, role: Role, payload: str) -> str:
        return hmac.new(self._keys[role], f"page secret of {payload}".encode(), "sha256").hexdigest()

    def _set_cookie(self, value: str, max_age_s: int, is_secure: bool) -> str:
        parts = [f"{self._name}={value}", f"Path={self._path}", f"Max-Age={max_age_s}", "HttpOnly", "SameSite=Strict"]
        return "; ".join([*parts, "Secure"] if is_secure else parts)


def _cookie_values(header: str, name: str) -> list[str]:
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return [value for found, _, value in pairs if found == name]
