"""GET /jobs: all jobs that this server knows."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

import megatrain
from megatrain_diagnostics.dashboard.answers.answer import cached_answer, document_bytes
from megatrain_diagnostics.dashboard.pages.jobs.document import JobsDocument
from megatrain_diagnostics.dashboard.pages.jobs.view import Choice, chosen_rows, counts_of, job_row
from megatrain_diagnostics.dashboard.parts import JobsParts
from megatrain_diagnostics.dashboard.security.roles import Caller, Proof, caller_of

_FRESH_S = 1.0
_MOST_COUNT = 500


def router(parts: JobsParts) -> APIRouter:
    """Return the route."""
    routes = APIRouter(tags=["jobs"])

    @routes.get("/jobs", response_model=JobsDocument)
    def jobs(
        request: Request,
        trouble: Literal["", "red", "amber", "green", "ended"] = "",
        text: Annotated[str, Query(max_length=200)] = "",
        order: Literal["trouble", "newest", "name"] = "trouble",
        first: Annotated[int, Query(ge=0, le=100_000)] = 0,
        count: Annotated[int, Query(ge=1, le=_MOST_COUNT)] = 100,
    ) -> Response:
        """Return `count` of the jobs that a choice leaves, from number `first` on; those in trouble come first."""
        caller, choice = caller_of(request), Choice(trouble, text, order, first, count)
        # the number of the look: a client that was notified of a change must not get an older answer
        key = ("jobs", parts.catalog.live().versions["jobs"], choice, caller.role, caller.proof)
        answer = parts.answers.get(key, lambda: document_bytes(_document(parts, choice, caller)), fresh_s=_FRESH_S)
        return cached_answer(request, answer)

    return routes


def _document(parts: JobsParts, choice: Choice, caller: Caller) -> JobsDocument:
    look, now_s = parts.catalog.look(), parts.clock()
    rows = [job_row(one, now_s) for one in look.jobs.values()]
    found = chosen_rows(rows, choice)
    return JobsDocument(
        at_unix_s=now_s,
        runs_directory="" if parts.catalog.runs is None else str(parts.catalog.runs),
        jobs=tuple(found[choice.first : choice.first + choice.count]),
        num_found=len(found),
        counts=counts_of(rows),
        problems=look.problems,
        look_s=look.took_s,
        role=caller.role.value,
        has_session=caller.proof is Proof.SESSION,
        version=megatrain.__version__,
    )
