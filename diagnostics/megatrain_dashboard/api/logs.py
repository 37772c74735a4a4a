"""GET /logs and /logs/causes: log lines as they were written, and the failures that they show.

The root cause comes before the failures that followed. Lines are plain text, never markup.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.document import Document
from megatrain_dashboard.responses.errors import bad_query, unavailable
from megatrain_dashboard.responses.query_parameters import From, RoundNumber, To, host_list, rank_list
from megatrain_dashboard.sources.hosts import roster_if_known
from megatrain_dashboard.sources.log_causes import classified_round
from megatrain_diagnostics.analysis.log_search import LogFinding, LoggedFailure
from megatrain_diagnostics.store.log_query import (
    FoundLines,
    LogQuery,
    logged_round,
    pattern_problem,
    search_lines,
)
from megatrain_diagnostics.store.reader import TooSlowError
from megatrain_job.failures.culprit import recorded_culprit

_NS = 1_000_000_000
_MAX_CAUSES = 1000
_MAX_CHARACTERS = 4000
_CAUSES_FRESH_S = 10.0
_LATEST_S = 9e9
"""The latest unix time whose nanoseconds fit an integer of 64 bits."""


class LogLineDocument(Document):
    rank: int
    host: str
    at_unix_s: float
    line: str


class LogLinesDocument(Document):
    """The response of /logs: in order of time, the newest `limit` of those that match."""

    round: int
    num_matching: int
    num_searched: int
    lines: tuple[LogLineDocument, ...]
    is_partial: bool
    """Whether time or memory ran out before all lines were searched; the newest lines were searched."""


class LogCauseDocument(Document):
    rank: int
    host: str
    label: str
    action: str
    role: str
    """root, cause or follows."""
    culprit: str
    rule: str
    line: str
    at_unix_s: float


class LogCausesDocument(Document):
    """The response of /logs/causes: `causes` with the root first; `culprit` is the rank or host that the line names."""

    round: int
    label: str
    action: str
    culprit: str
    reason: str
    root_rank: int | None
    root_text: str
    """A text that names the culprit; empty: there is none."""
    incident_id: str
    """The incident that blames the culprit; empty: only the logs do."""
    line: str
    num_ranks: int
    num_lines: int
    causes: tuple[LogCauseDocument, ...]


def lines_document(round_number: int, found: FoundLines, limit: int) -> LogLinesDocument:
    """Return the newest `limit` of the lines that were found, in order of time."""
    lines = found.lines
    first = max(0, len(lines.rank) - limit)
    return LogLinesDocument.of(
        found,
        round=round_number,
        lines=tuple(
            LogLineDocument(
                rank=int(lines.rank[row]),
                host=str(lines.host[row]),
                at_unix_s=int(lines.at_ns[row]) / _NS,
                line=str(lines.line[row])[:_MAX_CHARACTERS],
            )
            for row in range(first, len(lines.rank))
        ),
    )


def causes_document(round_number: int, found: LogFinding) -> LogCausesDocument:
    """Return the culprit of a round's failure, and the failures in all logs. The root comes before what followed."""
    culprit, classification = found.culprit, found.classification
    return LogCausesDocument.of(
        found,
        round=round_number,
        culprit=classification.culprit or "",
        reason=culprit.reason,
        root_rank=min(culprit.ranks, default=None),
        root_text=culprit.text,
        incident_id=culprit.incident,
        line=classification.line.strip()[:_MAX_CHARACTERS],
        causes=tuple(_cause(failure) for failure in found.failures[:_MAX_CAUSES]),
    )


def _cause(logged_failure: LoggedFailure) -> LogCauseDocument:
    line = logged_failure.line[:_MAX_CHARACTERS]
    return LogCauseDocument.of(logged_failure, line=line, at_unix_s=logged_failure.at_ns / _NS)


def router(parts: DashboardParts) -> APIRouter:
    """Return the routes that search log lines, and that name the causes of failures in the ends of all logs."""
    routes = APIRouter(tags=["logs"], dependencies=[parts.heavy_query])
    source, limits = parts.source, parts.settings.limits

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

        def make() -> LogLinesDocument:
            wanted = LogQuery(
                number, query, is_regex, asked_ranks, asked_hosts, limit, _ns(window.begin_s), _ns(window.end_s)
            )
            found = search_lines(source.events, wanted, budget_s=limits.log_search_s)
            return lines_document(number, found, limit)

        # the key holds the texts of ranks and hosts: a short text can name a million ranks, and a key is kept as long
        # as its response
        key = ("logs", source.live().versions["logs"], number, query, is_regex, ranks, hosts, limit, window)
        return parts.responses.answer(request, key, make)

    @routes.get("/logs/causes", response_model=LogCausesDocument)
    def causes(request: Request, round_number: RoundNumber = None) -> Response:
        """Return the culprit, and the causes in the ends of all logs: the root first, then what followed."""
        number = logged_round(source.events, round_number)
        recorded = recorded_culprit(source.facts().incidents, number)

        def make() -> LogCausesDocument:
            roster = roster_if_known(source, number)
            try:
                found = classified_round(source.events, roster, number, recorded, limits.log_causes_s)
            except TooSlowError as error:
                raise unavailable(f"the ends of the logs of round {number} take too long to read: {error}") from error
            return causes_document(number, found)

        return parts.responses.answer(request, ("causes", number, recorded), make, fresh_s=_CAUSES_FRESH_S)

    return routes


def _ns(at_s: float | None) -> int | None:
    return None if at_s is None else int(min(at_s, _LATEST_S) * 1e9)
