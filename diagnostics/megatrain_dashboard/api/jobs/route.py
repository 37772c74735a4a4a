"""GET /jobs: all jobs of this server."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

import megatrain
from megatrain_dashboard.api.jobs.document import JobsDocument
from megatrain_dashboard.api.jobs.view import Choice, chosen_rows, counts_of, job_row
from megatrain_dashboard.parts import JobsParts
from megatrain_dashboard.security.roles import Caller, Proof, caller_of

_FRESH_S = 1.0
_MAX_COUNT = 500


def router(parts: JobsParts) -> APIRouter:
    """Return the route that answers with the list of all jobs, chosen and sorted."""
    routes = APIRouter(tags=["jobs"])

    @routes.get("/jobs", response_model=JobsDocument)
    def jobs(
        request: Request,
        severity: Literal["", "red", "amber", "green", "ended"] = "",
        text: Annotated[str, Query(max_length=200)] = "",
        order: Literal["severity", "newest", "name"] = "severity",
        first: Annotated[int, Query(ge=0, le=100_000)] = 0,
        count: Annotated[int, Query(ge=1, le=_MAX_COUNT)] = 100,
    ) -> Response:
        """Return `count` of the jobs that match the filters, from number `first` on; the most severe come first."""
        caller, choice = caller_of(request), Choice(severity, text, order, first, count)
        # the number of the poll: a client that was notified of a change must not get an older response
        key = ("jobs", parts.catalog.live().versions["jobs"], choice, caller.role, caller.proof)
        return parts.responses.answer(request, key, lambda: _document(parts, choice, caller), fresh_s=_FRESH_S)

    return routes


def _document(parts: JobsParts, choice: Choice, caller: Caller) -> JobsDocument:
    poll, now_s = parts.catalog.last_poll(), parts.clock()
    rows = [job_row(job, now_s) for job in poll.jobs.values()]
    found = chosen_rows(rows, choice)
    return JobsDocument(
        at_unix_s=now_s,
        runs_directory="" if parts.catalog.runs is None else str(parts.catalog.runs),
        jobs=tuple(found[choice.first : choice.first + choice.count]),
        num_found=len(found),
        counts=counts_of(rows),
        problems=poll.problems,
        poll_s=poll.took_s,
        role=caller.role.value,
        has_session=caller.proof is Proof.SESSION,
        version=megatrain.__version__,
    )
