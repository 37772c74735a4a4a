"""Incidents and verdicts: what went wrong, what was done and why, what it cost."""

from __future__ import annotations

from megatrain_diagnostics.dashboard.answers.document import Document


class PhaseDocument(Document):
    """A phase of a recovery; `seconds` null: not over, or never reached."""

    name: str
    began_unix_s: float | None
    seconds: float | None


class FailureDocument(Document):
    """How one rank ended."""

    rank: int
    host: str
    exit_text: str
    label: str
    action: str
    is_cascade: bool
    """It followed from the failure of whom the incident blames."""
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
    """Root causes before what followed from them."""
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
    """A verdict of the diagnosis and what the driver made of it; outcome fields are empty while there is none."""

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
    price_s: float
    incident_id: str


class IncidentsDocument(Document):
    """The answer of /incidents, the newest first."""

    incidents: tuple[IncidentDocument, ...]
    verdicts: tuple[VerdictDocument, ...]
