"""POST /session exchanges a token for a cookie and a page secret, and DELETE /session ends both: a browser logs in and
out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from megatrain_dashboard.responses.cache import document_response
from megatrain_dashboard.responses.document import Document
from megatrain_dashboard.responses.errors import conflict
from megatrain_dashboard.security.authenticator import Authenticator
from megatrain_dashboard.security.guard import IS_SECURE_KEY
from megatrain_dashboard.security.sessions import PAGE_SECRET_HEADER
from megatrain_dashboard.settings import DashboardSettings


class SessionDocument(Document):
    """The response of POST /session."""

    role: Literal["viewer", "operator"]
    ends_unix_s: int
    page_secret: str
    """Sent with each request in the header X-Megatrain-Session; the cookie alone does not authenticate."""


class Login(Document):
    """The body of POST /session."""

    token: Annotated[str, Field(min_length=1, max_length=4096)]


def router(settings: DashboardSettings, authenticator: Authenticator, clock: Callable[[], float]) -> APIRouter:
    """Return the routes that exchange a token for a session cookie, and that end the session."""
    routes = APIRouter(tags=["session"])

    @routes.post("/session", response_model=SessionDocument)
    async def log_in(request: Request, login: Login) -> Response:
        """Exchange a token for a session of this browser."""
        if not settings.viewer_token and not settings.operator_token:
            raise conflict("this dashboard has no tokens: no login is needed")
        address = request.client.host if request.client is not None else ""
        now_s = clock()
        role = authenticator.role_of_token(login.token, address, now_s)
        is_secure = bool(request.scope[IS_SECURE_KEY])
        cookie, secret = authenticator.sessions.new_session(role, now_s, is_secure=is_secure)
        ends_unix_s = int(now_s + settings.session_s)
        response = document_response(SessionDocument(role=role.value, ends_unix_s=ends_unix_s, page_secret=secret))
        response.headers["set-cookie"] = cookie
        return response

    @routes.delete("/session", status_code=204)
    async def log_out(request: Request) -> Response:
        """End this browser's session and delete its cookie."""
        cookies, is_secure = request.headers.get("cookie", ""), bool(request.scope[IS_SECURE_KEY])
        secret = request.headers.get(PAGE_SECRET_HEADER, "")
        ended = authenticator.sessions.end_session(cookies, secret, clock(), is_secure=is_secure)
        return Response(status_code=204, headers={"set-cookie": ended})

    return routes
