"""Types of hosts: the state of each, what keeps it from training, and what its checks found."""

from __future__ import annotations

from megatrain_dashboard.responses.document import Document, ThresholdsDocument


class HostDocument(Document):
    host: str
    state: str
    is_in_order: bool
    is_driver: bool
    remark: str
    address: str
    hardware: str
    labels: dict[str, str]
    first_rank: int | None
    num_workers: int | None
    step: int | None
    median_step_s: float | None
    last_step_unix_s: float | None
    joined_unix_s: float | None
    straggler_score: float | None
    clock_offset_s: float | None
    """How far the host's clock is ahead of the daemon's; exact to clock_error_s."""
    clock_error_s: float | None
    cordon_reason: str
    cordon_by: str
    cordon_unix_s: float | None
    is_connected: bool | None
    """Whether events of the host arrive."""


class CheckDocument(Document):
    name: str
    outcome: str
    detail: str
    duration_s: float
    value: float | None
    unit: str


class HostsDocument(Document):
    """The response of /hosts: the round's first, by rank. `thresholds`: of `straggler_score`, null: not judged."""

    hosts: tuple[HostDocument, ...]
    thresholds: ThresholdsDocument | None


class HostHistoryDocument(Document):
    """The response of /hosts/{host}."""

    host: HostDocument
    checks: tuple[CheckDocument, ...]
    checks_unix_s: float | None
    incident_ids: tuple[str, ...]
    """Incidents that blame the host, the newest first."""
    victim_incident_ids: tuple[str, ...]
    """Incidents in which workers of the host ended because of others."""
    rounds: tuple[int, ...]
    """The rounds that the host took part in."""
