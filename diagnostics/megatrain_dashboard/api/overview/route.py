"""GET /overview and /series."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.errors import DataError
from megatrain_dashboard.api.overview.document import OverviewDocument, SeriesDocument
from megatrain_dashboard.api.overview.series_view import series_document
from megatrain_dashboard.api.overview.view import OverviewInputs, overview_document
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import cached_response, document_bytes
from megatrain_dashboard.responses.heavy import HeavyQueries
from megatrain_dashboard.responses.query_parameters import From, RoundNumber, To, check_round
from megatrain_dashboard.sources.protocol import JobSource

_FRESH_S = 0.5
_MAX_SERIES = 4
"""Requests at a time. They have a limit of their own, because one may read thousands of steps again, and so that charts
do not wait for a heat map."""


def router(parts: DashboardParts) -> APIRouter:
    """Return the routes that answer with the state of the job, and with its charts: loss, times, throughput."""
    routes = APIRouter(tags=["overview"])

    @routes.get("/overview", response_model=OverviewDocument)
    def overview(request: Request) -> Response:
        """Return the state of the job, at most half a second old."""

        def make() -> bytes:
            return document_bytes(overview_document(overview_inputs(parts.source, parts.clock())))

        return cached_response(request, parts.responses.get(("overview",), make, fresh_s=_FRESH_S))

    turns = HeavyQueries(num_running=_MAX_SERIES)

    @routes.get("/series", response_model=SeriesDocument, dependencies=[Depends(turns.slot, scope="function")])
    def series(
        request: Request,
        round_number: RoundNumber = None,
        begin: From = "",
        end: To = "",
        points: Annotated[int, Query(ge=2, le=10_000)] = 600,
    ) -> Response:
        """Return loss, gradient norm, times and throughput of steps, at most `points` entries, extremes kept.

        A part of at most 16,384 steps is read from the store step by step, whatever its age, if the store still has it.
        """
        source = parts.source
        check_round(source.facts(), round_number)
        window = parts.window(begin, end)

        def make() -> bytes:
            found = source.series_part(window.first_step, window.last_step)
            return document_bytes(series_document(found, round_number=round_number, window=window, points=points))

        key = ("series", source.live().versions["series"], round_number, window, points)
        return cached_response(request, parts.responses.get(key, make))

    return routes


def overview_inputs(source: JobSource, now_s: float) -> OverviewInputs:
    """Return all inputs of the overview."""
    return OverviewInputs(
        now_s=now_s,
        facts=source.facts(),
        snapshot=source.snapshot(),
        etcd_problem=source.etcd_problem(),
        state=source.daemon_state(),
        is_recorded=source.is_recorded,
        num_hosts=_num_hosts(source) if source.is_recorded else 0,
    )


def _num_hosts(source: JobSource) -> int:
    try:
        return len(set(source.roster(None).hosts.values()))
    except DataError:
        return 0
