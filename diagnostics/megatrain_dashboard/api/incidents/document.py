"""Types of incidents and verdicts: the failure, the response with its reason, and the cost."""

from __future__ import annotations

from typing import Literal

from megatrain_dashboard.actions.document import ActionKind
from megatrain_dashboard.responses.document import Document


class PhaseDocument(Document):
    """A phase of a recovery; `seconds` null: not over, or never reached."""

    name: str
    began_unix_s: float | None
    seconds: float | None


class FailureDocument(Document):
    """The end of one rank."""

    rank: int
    host: str
    exit_text: str
    label: str
    action: str
    is_cascade: bool
    """Whether it followed from the failure of the rank or host that the incident blames."""
    culprit: str
    line: str
    at_unix_s: float


class IncidentDocument(Document):
    incident_id: str
    kind: str
    kind_text: str
    state: str
    round: int
    next_round: int | None
    began_unix_s: float
    detected_unix_s: float
    reason: str
    action: str
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    confidence: str
    evidence: tuple[str, ...]
    failures: tuple[FailureDocument, ...]
    """Root causes come before the failures that followed from them."""
    phases: tuple[PhaseDocument, ...]
    down_s: float | None
    last_step: int | None
    resumed_step: int | None
    steps_lost: int | None
    effective_time_ratio: float | None
    verdict_id: str
    driver: str
    notes: dict[str, str]


class VerdictDocument(Document):
    """A verdict of the diagnosis and the driver's outcome; the fields of the outcome are empty while there is none."""

    verdict_id: str
    kind: str
    cause: str
    confidence: str
    round: int
    created_unix_s: float
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    evidence: tuple[str, ...]
    first_step: int | None
    last_step: int | None
    step_s: float | None
    gain_s_per_step: float
    outcome: str
    """acted, waiting, dry-run, declined, or empty."""
    outcome_reason: str
    outcome_by: str
    outcome_unix_s: float | None
    gain_s: float
    cost_s: float
    incident_id: str


class DamagedIncidentDocument(Document):
    """An incident whose record cannot be read."""

    incident_id: str
    text: str


class IncidentsDocument(Document):
    """The response of /incidents, the newest first."""

    incidents: tuple[IncidentDocument, ...]
    verdicts: tuple[VerdictDocument, ...]
    damaged: tuple[DamagedIncidentDocument, ...]


class HappenedDocument(Document):
    """Something that happened in an incident."""

    at_unix_s: float
    what: Literal["fault", "noticed", "verdict", "decision", "step", "over", "notified", "not-notified"]
    text: str


class OfferedActionDocument(Document):
    """An action that a person can request and that makes sense in the current state of this incident."""

    kind: ActionKind
    target: str
    """A host, a verdict, or empty: the whole job."""


class StoryDocument(Document):
    """The response of /incidents/{id}/story: what happened in order, who was notified, and what can be done."""

    incident_id: str
    happened: tuple[HappenedDocument, ...]
    """In order of time."""
    notifications: tuple[HappenedDocument, ...]
    """Attempts to notify receivers of the incident, in order of time."""
    why_not_notified: str
    """The reason why no receiver was notified, as far as that is known; empty if `notifications` has entries."""
    actions: tuple[OfferedActionDocument, ...]
    runbooks: tuple[str, ...]
    """The first one is the runbook to begin with; empty: no action is needed."""


class IncidentLineDocument(Document):
    rank: int
    host: str
    at_unix_s: float
    line: str
    is_cause: bool
    """Whether the line shows the cause, by the rules that classify logs."""


class IncidentLogsDocument(Document):
    """The response of /incidents/{id}/logs: the last lines before an incident, each group in order of time."""

    round: int
    until_unix_s: float
    culprit_text: str
    """The culprit that the incident names; empty: there is none, and all lines are in `other_lines`."""
    culprit_lines: tuple[IncidentLineDocument, ...]
    other_lines: tuple[IncidentLineDocument, ...]
    label: str
    """The failure class that the logs show; empty: the logs do not show it, or the incident is not a failure."""
    action: str
    cause_line: str
    cause_rank: int | None
    problem: str
    """The reason why there are no lines, or none of the culprit; empty where there are."""
    log_file: str
    """The culprit's log file in the run directory; empty: there is no culprit, or its host is not known."""
