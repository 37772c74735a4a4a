"""POST /actions: what an operator asks for. GET /audit is a page of its own."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from megatrain_diagnostics.dashboard.actions.checks import why_not_act
from megatrain_diagnostics.dashboard.actions.desk import ActionDesk
from megatrain_diagnostics.dashboard.actions.document import ActionAnswer, ActionRequest
from megatrain_diagnostics.dashboard.answers.answer import document_answer
from megatrain_diagnostics.dashboard.answers.errors import RefusalError
from megatrain_diagnostics.dashboard.parts import Parts
from megatrain_diagnostics.dashboard.security.roles import caller_of


def router(parts: Parts, desk: ActionDesk | None) -> APIRouter:
    """Return the route of actions. `desk` None: nothing can be acted on."""
    routes = APIRouter(tags=["actions"])

    @routes.post("/actions", response_model=ActionAnswer)
    def act(request: Request, wish: ActionRequest) -> Response:
        """Carry out a wish, or with is_dry_run say what it would do. Sent twice under one key, it is done once."""
        caller = caller_of(request)
        is_enabled, is_recorded = parts.settings.enable_actions, parts.source.is_recorded
        reason = why_not_act(caller, is_enabled=is_enabled, is_recorded=is_recorded)
        if reason or desk is None:
            raise RefusalError(403, reason or "there is nothing to act on")
        return document_answer(desk.take(wish, caller))

    return routes
