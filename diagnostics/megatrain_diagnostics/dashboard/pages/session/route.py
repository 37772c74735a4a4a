"""POST /session: a token for a cookie. DELETE /session: the cookie taken away. What a browser logs in and out with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from megatrain_diagnostics.dashboard.answers.answer import document_answer
from megatrain_diagnostics.dashboard.answers.document import Document
from megatrain_diagnostics.dashboard.answers.errors import conflict
from megatrain_diagnostics.dashboard.pages.session.document import SessionDocument
from megatrain_diagnostics.dashboard.security.guard import IS_SECURE_KEY
from megatrain_diagnostics.dashboard.security.identity import Identity
from megatrain_diagnostics.dashboard.settings import DashboardSettings


class Login(Document):
    """The body of POST /session."""

    token: Annotated[str, Field(min_length=1, max_length=4096)]


def router(settings: DashboardSettings, identity: Identity, clock: Callable[[], float]) -> APIRouter:
    """Return the routes of logging in and out."""
    routes = APIRouter(tags=["session"])

    @routes.post("/session", response_model=SessionDocument)
    async def log_in(request: Request, login: Login) -> Response:
        """Trade a token for a session of this browser."""
        if not settings.viewer_token and not settings.operator_token:
            raise conflict("this dashboard has no tokens: nobody needs to log in")
        address = request.client.host if request.client is not None else ""
        now_s = clock()
        role = identity.role_of_token(login.token, address, now_s)
        answer = document_answer(SessionDocument(role=role.value, ends_unix_s=int(now_s + settings.session_s)))
        is_secure = bool(request.scope[IS_SECURE_KEY])
        answer.headers["set-cookie"] = identity.sessions.new_cookie(role, now_s, is_secure=is_secure)
        return answer

    @routes.delete("/session", status_code=204)
    async def log_out(request: Request) -> Response:
        """End this browser's session, and take its cookie away."""
        cookies, is_secure = request.headers.get("cookie", ""), bool(request.scope[IS_SECURE_KEY])
        ended = identity.sessions.end_cookie(cookies, clock(), is_secure=is_secure)
        return Response(status_code=204, headers={"set-cookie": ended})

    return routes
