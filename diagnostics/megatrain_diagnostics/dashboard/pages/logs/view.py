"""/logs and /logs/causes: lines as they were written, and what they say of a failure. Text is text, never markup."""

from __future__ import annotations

from megatrain_diagnostics.analysis.log_search import LogFinding, LoggedFailure
from megatrain_diagnostics.dashboard.pages.logs.document import (
    LogCauseDocument,
    LogLineDocument,
    LogLinesDocument,
    LogVerdictDocument,
)
from megatrain_diagnostics.store.log_query import FoundLines

_NS = 1_000_000_000
_MOST_CAUSES = 1000
_MOST_CHARACTERS = 4000


def lines_document(round_number: int, found: FoundLines, limit: int) -> LogLinesDocument:
    """Return the newest `limit` of the lines that were found, in order of time."""
    lines = found.lines
    first = max(0, len(lines.rank) - limit)
    return LogLinesDocument(
        round=round_number,
        num_matching=found.num_matching,
        num_searched=found.num_searched,
        lines=tuple(
            LogLineDocument(
                rank=int(lines.rank[row]),
                host=str(lines.host[row]),
                at_unix_s=int(lines.at_ns[row]) / _NS,
                line=str(lines.line[row])[:_MOST_CHARACTERS],
            )
            for row in range(first, len(lines.rank))
        ),
        is_partial=found.is_partial,
    )


def causes_document(round_number: int, found: LogFinding) -> LogVerdictDocument:
    """Return whom to blame for the failure of a round, and what all logs say, the root before what followed from it."""
    culprit, verdict = found.culprit, found.verdict
    return LogVerdictDocument(
        round=round_number,
        label=found.label,
        action=found.action,
        culprit=verdict.culprit or "",
        reason=culprit.reason,
        root_rank=min(culprit.ranks, default=None),
        root_text=culprit.text,
        incident_id=culprit.incident,
        line=verdict.line.strip()[:_MOST_CHARACTERS],
        num_ranks=found.num_ranks,
        num_lines=found.num_lines,
        causes=tuple(_cause(one) for one in found.failures[:_MOST_CAUSES]),
    )


def _cause(one: LoggedFailure) -> LogCauseDocument:
    return LogCauseDocument(
        rank=one.rank,
        host=one.host,
        label=one.label,
        action=one.action,
        role=str(one.role),
        culprit=one.culprit,
        rule=one.rule,
        line=one.line[:_MOST_CHARACTERS],
        at_unix_s=one.at_ns / _NS,
    )
