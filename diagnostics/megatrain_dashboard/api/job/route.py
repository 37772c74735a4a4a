"""GET /job: the identity of the job, and what the caller may do with it."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

import megatrain
from megatrain_dashboard.actions.checks import why_not_act
from megatrain_dashboard.api.job.document import JobDocument
from megatrain_dashboard.api.job.view import job_facts
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import document_response
from megatrain_dashboard.security.roles import Proof, caller_of


def router(parts: DashboardParts) -> APIRouter:
    """Return the route that answers with the job's identity and the caller's permissions."""
    routes = APIRouter(tags=["job"])

    @routes.get("/job", response_model=JobDocument)
    def job(request: Request) -> Response:
        """Return what a page needs first."""
        caller, source, settings = caller_of(request), parts.source, parts.settings
        reason = why_not_act(caller, is_enabled=settings.enable_actions, is_recorded=source.is_recorded)
        layout, rounds, operations = job_facts(source)
        return document_response(
            JobDocument(
                job=source.job,
                run_directory=str(source.run.root),
                is_recorded=source.is_recorded,
                layout=layout,
                rounds=rounds,
                operations=operations,
                role=caller.role.value,
                can_act=not reason,
                why_not_act=reason,
                has_session=caller.proof is Proof.SESSION,
                perfetto_url=settings.perfetto_url,
                version=megatrain.__version__,
            )
        )

    return routes
