"""GET /logs and /logs/causes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.errors import DataError
from megatrain_dashboard.api.logs.document import LogCausesDocument, LogLinesDocument
from megatrain_dashboard.api.logs.view import causes_document, lines_document
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import cached_response, document_bytes
from megatrain_dashboard.responses.errors import bad_query, unavailable
from megatrain_dashboard.responses.query_parameters import From, RoundNumber, To, host_list, rank_list
from megatrain_dashboard.sources.protocol import JobSource
from megatrain_diagnostics.analysis.log_search import classify_logs
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.store.log_query import (
    LogQuery,
    logged_round,
    newest_tails,
    pattern_problem,
    search_lines,
)
from megatrain_diagnostics.store.reader import TooSlowError
from megatrain_job.failures.culprit import Culprit, recorded_culprit

_BUDGET_S = 2.0
_CAUSES_BUDGET_S = 10.0
_MAX_JUDGED_LINES = 50_000
"""Classifying these takes seven seconds if every line reports a failure."""
_CAUSES_FRESH_S = 10.0
_LATEST_S = 9e9
"""The latest unix time whose nanoseconds fit an integer of 64 bits."""


def router(parts: DashboardParts) -> APIRouter:
    """Return the routes that search log lines, and that name the causes of failures in the ends of all logs."""
    routes = APIRouter(tags=["logs"], dependencies=[parts.heavy_query])
    source = parts.source

    @routes.get("/logs", response_model=LogLinesDocument)
    def logs(
        request: Request,
        query: Annotated[str, Query(max_length=500)] = "",
        is_regex: bool = False,
        ranks: Annotated[str, Query(max_length=10_000)] = "",
        hosts: Annotated[str, Query(max_length=10_000)] = "",
        round_number: RoundNumber = None,
        limit: Annotated[int, Query(ge=1, le=5000)] = 500,
        begin: From = "",
        end: To = "",
    ) -> Response:
        """Return the newest lines that contain a text (ignoring case) or match a regular expression (RE2)."""
        window = parts.window(begin, end)
        problem = pattern_problem(query) if is_regex else ""
        if problem:
            raise bad_query("query", query, f"not a valid regular expression: {problem}")
        number = logged_round(source.events, round_number)
        asked_ranks, asked_hosts = rank_list(ranks), host_list(hosts)

        def make() -> bytes:
            wanted = LogQuery(
                number, query, is_regex, asked_ranks, asked_hosts, limit, _ns(window.begin_s), _ns(window.end_s)
            )
            return document_bytes(
                lines_document(number, search_lines(source.events, wanted, budget_s=_BUDGET_S), limit)
            )

        # the key holds the texts of ranks and hosts: a short text can name a million ranks, and a key is kept as long
        # as its response
        key = ("logs", source.live().versions["logs"], number, query, is_regex, ranks, hosts, limit, window)
        return cached_response(request, parts.responses.get(key, make))

    @routes.get("/logs/causes", response_model=LogCausesDocument)
    def causes(request: Request, round_number: RoundNumber = None) -> Response:
        """Return the culprit, and the causes in the ends of all logs: the root first, then what followed."""
        number = logged_round(source.events, round_number)
        recorded = recorded_culprit(source.facts().incidents, number)
        key = ("causes", number, recorded)
        response = parts.responses.get(key, lambda: _causes(source, number, recorded), fresh_s=_CAUSES_FRESH_S)
        return cached_response(request, response)

    return routes


def _ns(at_s: float | None) -> int | None:
    return None if at_s is None else int(min(at_s, _LATEST_S) * 1e9)


def _causes(source: JobSource, round_number: int, recorded: Culprit | None) -> bytes:
    roster = _roster(source, round_number)
    num_ranks = 1 if roster is None else roster.layout.world_size
    where = Where(rounds=(round_number,))
    try:
        lines = newest_tails(source.events, where, _MAX_JUDGED_LINES, num_ranks=num_ranks, budget_s=_CAUSES_BUDGET_S)
    except TooSlowError as error:
        raise unavailable(f"the ends of {num_ranks:,} logs take too long to read: {error}") from error
    return document_bytes(causes_document(round_number, classify_logs(lines, roster, recorded)))


def _roster(source: JobSource, round_number: int) -> Roster | None:
    try:
        return source.roster(round_number)
    except DataError:
        return None
