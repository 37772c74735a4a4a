"""GET /overview and /series."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.dashboard.answers.answer import cached_answer, document_bytes
from megatrain_diagnostics.dashboard.answers.questions import From, RoundNumber, To, check_round
from megatrain_diagnostics.dashboard.pages.overview.document import OverviewDocument, SeriesDocument
from megatrain_diagnostics.dashboard.pages.overview.series_view import series_document
from megatrain_diagnostics.dashboard.pages.overview.view import OverviewInputs, overview_document
from megatrain_diagnostics.dashboard.parts import Parts
from megatrain_diagnostics.dashboard.security.heavy import HeavyQuestions
from megatrain_diagnostics.dashboard.sources.protocol import JobSource

_FRESH_S = 0.5
_MOST_SERIES = 4
"""At a time: one may read thousands of steps anew, and no heat map shall keep the charts waiting."""


def router(parts: Parts) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(tags=["overview"])

    @routes.get("/overview", response_model=OverviewDocument)
    def overview(request: Request) -> Response:
        """Return how the job is, at most half a second old."""

        def make() -> bytes:
            return document_bytes(overview_document(overview_inputs(parts.source, parts.clock())))

        return cached_answer(request, parts.answers.get(("overview",), make, fresh_s=_FRESH_S))

    turns = HeavyQuestions(num_running=_MOST_SERIES)

    @routes.get("/series", response_model=SeriesDocument, dependencies=[Depends(turns.slot, scope="function")])
    def series(
        request: Request,
        round_number: RoundNumber = None,
        begin: From = "",
        end: To = "",
        points: Annotated[int, Query(ge=2, le=10_000)] = 600,
    ) -> Response:
        """Return loss, gradient norm, times and throughput of steps, at most `points` entries, extremes kept.

        Of a part of at most 16,384 steps each is told by itself, as long as the store has it, whatever its age.
        """
        source = parts.source
        check_round(source.facts(), round_number)
        window = parts.window(begin, end)

        def make() -> bytes:
            found = source.series_part(window.first_step, window.last_step)
            return document_bytes(series_document(found, round_number=round_number, window=window, points=points))

        key = ("series", source.live().versions["series"], round_number, window, points)
        return cached_answer(request, parts.answers.get(key, make))

    return routes


def overview_inputs(source: JobSource, now_s: float) -> OverviewInputs:
    """Return all that the overview is made from."""
    return OverviewInputs(
        now_s=now_s,
        facts=source.facts(),
        snapshot=source.snapshot(),
        etcd_trouble=source.etcd_trouble(),
        state=source.daemon_state(),
        is_recorded=source.is_recorded,
        num_hosts=_num_hosts(source) if source.is_recorded else 0,
    )


def _num_hosts(source: JobSource) -> int:
    try:
        return len(set(source.roster(None).hosts.values()))
    except DataError:
        return 0
