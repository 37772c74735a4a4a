"""POST /actions: an action that an operator requests. GET /audit lists the actions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from megatrain_dashboard.actions.checks import why_not_act
from megatrain_dashboard.actions.document import ActionAnswer, ActionRequest
from megatrain_dashboard.actions.handler import ActionHandler
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import document_response
from megatrain_dashboard.responses.errors import RefusalError
from megatrain_dashboard.security.roles import caller_of


def router(parts: DashboardParts, handler: ActionHandler | None) -> APIRouter:
    """Return the route of actions. `handler` None: no actions are possible."""
    routes = APIRouter(tags=["actions"])

    @routes.post("/actions", response_model=ActionAnswer)
    def act(request: Request, body: ActionRequest) -> Response:
        """Carry out an action, once for each idempotency_key; with is_dry_run, return what it would do."""
        caller = caller_of(request)
        is_enabled, is_recorded = parts.settings.enable_actions, parts.source.is_recorded
        reason = why_not_act(caller, is_enabled=is_enabled, is_recorded=is_recorded)
        if reason or handler is None:
            raise RefusalError(403, reason or "actions need a running job")
        return document_response(handler.take(body, caller))

    return routes
