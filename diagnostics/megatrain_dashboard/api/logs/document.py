"""Types of log lines and of the failures that they show. The root cause comes before the failures that followed."""

from __future__ import annotations

from megatrain_dashboard.responses.document import Document


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
