"""Lines of all ranks, and what they say: the root cause before what followed from it."""

from __future__ import annotations

from megatrain_diagnostics.dashboard.answers.document import Document


class LogLineDocument(Document):
    rank: int
    host: str
    at_unix_s: float
    line: str


class LogLinesDocument(Document):
    """The answer of /logs: in order of time, the newest `limit` of those that match."""

    round: int
    num_matching: int
    num_searched: int
    lines: tuple[LogLineDocument, ...]
    is_partial: bool
    """Time or memory ran out before all lines were searched: the newest were."""


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


class LogVerdictDocument(Document):
    """The answer of /logs/causes: `causes` with the root first; `culprit` is whom the line names."""

    round: int
    label: str
    action: str
    culprit: str
    reason: str
    root_rank: int | None
    root_text: str
    """Who is to blame, in words; empty: nobody is named."""
    incident_id: str
    """Of the incident that blames them; empty: the logs alone do."""
    line: str
    num_ranks: int
    num_lines: int
    causes: tuple[LogCauseDocument, ...]
