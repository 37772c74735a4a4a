"""Make the documents of /logs and /logs/causes: lines as they were written, and the failures that they show.

Lines are plain text, never markup.
"""

from __future__ import annotations

from megatrain_dashboard.api.logs.document import (
    LogCauseDocument,
    LogCausesDocument,
    LogLineDocument,
    LogLinesDocument,
)
from megatrain_diagnostics.analysis.log_search import LogFinding, LoggedFailure
from megatrain_diagnostics.store.log_query import FoundLines

_NS = 1_000_000_000
_MAX_CAUSES = 1000
_MAX_CHARACTERS = 4000


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
                line=str(lines.line[row])[:_MAX_CHARACTERS],
            )
            for row in range(first, len(lines.rank))
        ),
        is_partial=found.is_partial,
    )


def causes_document(round_number: int, found: LogFinding) -> LogCausesDocument:
    """Return the culprit of a round's failure, and the failures in all logs. The root comes before what followed."""
    culprit, classification = found.culprit, found.classification
    return LogCausesDocument(
        round=round_number,
        label=found.label,
        action=found.action,
        culprit=classification.culprit or "",
        reason=culprit.reason,
        root_rank=min(culprit.ranks, default=None),
        root_text=culprit.text,
        incident_id=culprit.incident,
        line=classification.line.strip()[:_MAX_CHARACTERS],
        num_ranks=found.num_ranks,
        num_lines=found.num_lines,
        causes=tuple(_cause(one) for one in found.failures[:_MAX_CAUSES]),
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
        line=one.line[:_MAX_CHARACTERS],
        at_unix_s=one.at_ns / _NS,
    )
