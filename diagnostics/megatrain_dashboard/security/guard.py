"""The checks that every request passes before a route sees it, and every response before it is sent.

The cheap checks come first: the form of the headers, the name of the host, the caller, the page that made the request,
and the size and time of the body. Every refusal is answered with an ErrorDocument, every response has the security
headers, and no bug of the dashboard shows a stack trace.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatrain_dashboard.responses.errors import RefusalError, internal_error, refusal_response, shown
from megatrain_dashboard.security.authenticator import Authenticator
from megatrain_dashboard.security.headers import secured
from megatrain_dashboard.security.origins import REQUEST_HEADER, SAFE_METHODS, Origins
from megatrain_dashboard.security.roles import SCOPE_KEY
from megatrain_dashboard.security.sessions import PAGE_SECRET_HEADER
from megatrain_dashboard.settings import DashboardSettings

API = "/api/"
SESSION_PATH = "/api/v1/session"
IS_SECURE_KEY = "megatrain.is_secure"
JOB_KEY = "megatrain.job"
"""Key of the request's scope for the name of the job that it concerns; an empty name: no single job."""
_OF_JOB = re.compile(r"/jobs/([^/]+)(/.*)", re.DOTALL)
_SINGLE = (
    "host", "authorization", "content-length", "content-type", "transfer-encoding", "origin", "sec-fetch-site",
    "sec-fetch-mode", "sec-fetch-dest", "x-forwarded-proto", "if-none-match", "last-event-id", REQUEST_HEADER,
    PAGE_SECRET_HEADER,
)  # fmt: skip
_logger = logging.getLogger(__name__)
_MAX_DIGITS = 9
_DRAINED_BYTES = 2**20
"""This much of a body that is too large is read and discarded: a client that is cut off while it sends would never read
the refusal."""


class Guard:
    """Middleware that checks requests before `app`."""

    def __init__(
        self,
        app: ASGIApp,
        settings: DashboardSettings,
        authenticator: Authenticator,
        clock: Callable[[], float] = time.time,
        *,
        has_many: bool = False,
    ) -> None:
        """`has_many`: paths may begin with jobs/NAME/, which names a job; routes get the rest of the path."""
        self._has_many = has_many
        self._app, self._settings, self._authenticator, self._clock = app, settings, authenticator, clock
        self._origins = Origins(settings)
        self._single = frozenset(filter(None, (*_SINGLE, settings.user_header, settings.role_header)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        has_begun = False

        async def send_secured(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message = {**message, "headers": secured(list(message.get("headers", [])))}
            await send(message)

        try:
            checked = await self._checked(scope, receive)
            await self._app(*checked, send_secured)
        except RefusalError as refusal:
            response = refusal_response(refusal)
            # the unread rest of a request must not be parsed as the next one
            response.headers["connection"] = "close"
            await response(scope, receive, send_secured)
        except Exception as error:  # the details go only to the log
            if has_begun:
                _logger.error("a response was cut off by an error: %s", shown(scope["path"]), exc_info=error)
                return
            await internal_error(scope["path"], error)(scope, receive, send_secured)

    async def _checked(self, scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
        """Return the request in the form that routes get. Raises: RefusalError."""
        headers = self._headers(scope)
        address = scope["client"][0] if scope.get("client") else ""
        self._origins.check_host(headers.get("host", ""))
        job, path = self._own_path(scope["path"])
        scope = {**scope, "path": path, "root_path": "", JOB_KEY: job}
        scope["raw_path"] = scope["path"].encode()
        scope[IS_SECURE_KEY] = scope["scheme"] == "https" or (
            self._authenticator.is_from_proxy(address) and headers.get("x-forwarded-proto") == "https"
        )
        is_safe = scope["method"] in SAFE_METHODS
        caller = None
        if scope["path"].startswith(API) and scope["path"] != SESSION_PATH:
            caller = scope[SCOPE_KEY] = self._authenticator.caller(headers, address, self._clock())
            self._origins.check_read(headers)
        if not is_safe:
            self._origins.check_change(headers, is_browser=caller is None or caller.is_browser)
        body = self._no_body(headers) if is_safe else await self._body(headers, receive)
        return scope, _replayed(body, receive)

    def _headers(self, scope: Scope) -> Mapping[str, str]:
        """Return name -> value. Raises: RefusalError for headers that are too large, or repeated but must be single."""
        limits, found = self._settings.limits, dict[str, str]()
        raw: list[tuple[bytes, bytes]] = scope["headers"]
        num_bytes = len(scope["raw_path"]) + len(scope["query_string"]) + sum(map(_num_bytes, raw))
        if len(raw) > limits.max_headers or num_bytes > limits.max_head_bytes:
            rule = f"at most {limits.max_headers} headers, and {limits.max_head_bytes} bytes before the body"
            raise RefusalError(431, f"{len(raw)} headers, {num_bytes} bytes: {rule}")
        for name_bytes, value_bytes in raw:
            name, value = name_bytes.decode("latin-1").lower(), value_bytes.decode("latin-1")
            if name in found and name in self._single:
                raise RefusalError(400, f"{name} is given twice; send it once")
            joint = "; " if name == "cookie" else ", "
            found[name] = f"{found[name]}{joint}{value}" if name in found else value
        if "content-length" in found and "transfer-encoding" in found:
            raise RefusalError(400, "Content-Length and Transfer-Encoding are both given; send one of them")
        return found

    def _no_body(self, headers: Mapping[str, str]) -> bytes:
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            raise RefusalError(400, "a request of this method must not have a body")
        return b""

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        """Read the body, up to its limits. Raises: RefusalError."""
        limits = self._settings.limits
        stated = headers.get("content-length", "0")
        if not stated.isascii() or not stated.isdigit():
            raise RefusalError(400, f"Content-Length {shown(stated)} is not a number")
        stated_bytes = int(stated) if len(stated) <= _MAX_DIGITS else 10**_MAX_DIGITS
        too_large = RefusalError(413, f"a body has at most {limits.max_body_bytes} bytes")
        if stated_bytes > _DRAINED_BYTES:
            raise too_large
        is_too_large = stated_bytes > limits.max_body_bytes
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(limits.body_s):
                while num_bytes <= _DRAINED_BYTES:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RefusalError(400, "the body ended early")
                    part = message.get("body", b"")
                    num_bytes += len(part)
                    is_too_large = is_too_large or num_bytes > limits.max_body_bytes
                    parts = [] if is_too_large else [*parts, part]
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise RefusalError(408, f"the body did not arrive within {limits.body_s:g} s") from None
        if is_too_large:
            raise too_large
        return b"".join(parts)

    def _own_path(self, path: str) -> tuple[str, str]:
        """Return the job, and the path below it and below the base path. A proxy may have removed the base path."""
        base = self._settings.base_path
        path = path.removeprefix(base) if base and path.startswith(f"{base}/") else path
        found = _OF_JOB.fullmatch(path) if self._has_many else None
        return (found[1], found[2]) if found is not None else ("", path)


def _num_bytes(header: tuple[bytes, bytes]) -> int:
    return len(header[0]) + len(header[1])


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the body that was read, and then waits for the end of the connection."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
