"""GET /overview, /series and /sources."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.errors import DataError
from megatrain_dashboard.api.overview.document import OverviewDocument, SeriesDocument, SourcesDocument
from megatrain_dashboard.api.overview.series_view import series_document
from megatrain_dashboard.api.overview.sources_view import sources_document
from megatrain_dashboard.api.overview.view import OverviewInputs, overview_document
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import file_version
from megatrain_dashboard.responses.errors import unavailable
from megatrain_dashboard.responses.heavy import HeavyQueries
from megatrain_dashboard.responses.query_parameters import From, RoundNumber, To, check_round
from megatrain_dashboard.sources.protocol import JobSource
from megatrain_dashboard.sources.runs.metrics_records import read_metrics_records

_FRESH_S = 0.5
_MAX_SERIES = 4
"""Limit of the requests for charts that run at the same time, because each may read thousands of steps. It is separate
from the limit of other heavy requests, so that charts do not wait for a heat map."""
_RECORD_BYTES = 8 * 2**20


def router(parts: DashboardParts) -> APIRouter:
    """Return the routes that answer with the state of the job, and with its charts: loss, times, throughput."""
    routes = APIRouter(tags=["overview"])

    @routes.get("/overview", response_model=OverviewDocument)
    def overview(request: Request) -> Response:
        """Return the state of the job, at most half a second old."""
        return parts.responses.answer(
            request,
            ("overview",),
            lambda: overview_document(overview_inputs(parts.source, parts.clock())),
            fresh_s=_FRESH_S,
        )

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

        def make() -> SeriesDocument:
            found = source.series_part(window.first_step, window.last_step)
            return series_document(found, round_number=round_number, window=window, points=points)

        key = ("series", source.live().versions["series"], round_number, window, points)
        return parts.responses.answer(request, key, make)

    @routes.get("/sources", response_model=SourcesDocument, dependencies=[Depends(turns.slot, scope="function")])
    def sources(
        request: Request,
        begin: From = "",
        end: To = "",
        source: Annotated[str, Query(max_length=200, description="the source of `series`")] = "",
        points: Annotated[int, Query(ge=2, le=2000)] = 400,
    ) -> Response:
        """Return the training loss of each source of the data, from the records of steps in metrics.jsonl.

        Of a part with more than 8 MiB of records, evenly spread pieces are read.
        """
        window = parts.window(begin, end)

        def make() -> SourcesDocument:
            try:
                read = read_metrics_records(parts.source.run, _RECORD_BYTES, window.begin_s, window.end_s)
            except OSError as error:
                raise unavailable(f"metrics/metrics.jsonl cannot be read: {error.strerror or error}") from error
            return sources_document(read, window=window, name=source, points=points)

        key = ("sources", file_version(parts.source.run.metrics_file), window, source, points)
        return parts.responses.answer(request, key, make)

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
