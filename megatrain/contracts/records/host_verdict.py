"""Verdicts: the diagnosis's findings about a host or the training itself, and the driver's decisions on them.

The daemon's controller writes a HostVerdict. Only the driver decides, and writes a VerdictOutcome. Both are kept as an
audit log. A verdict applies to one round only, not to later rounds (ADR 0023). Steps count from 0, as in events: a
checkpoint of step n is the state after steps 0 to n - 1; the next step is n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class VerdictKind(StrEnum):
    STRAGGLER = "straggler"
    """A host, or its share of the work, makes the job slow."""
    HANG = "hang"
    """Ranks are stuck. Refines the driver's own finding."""
    NUMERICS = "numerics"
    """The loss or gradient norm jumped or is not finite: return to an earlier step and leave out the bad batches."""


class Cause(StrEnum):
    """Why something is slow. Only the first two causes disappear if the host is replaced."""

    COMPUTE = "compute"
    NETWORK = "network"
    DATA = "data"
    GC = "gc"
    LENGTHS = "sequence-length"
    STAGE = "stage"
    """The model's partition into stages: all ranks of a stage are slow."""
    UNKNOWN = "unknown"

    @property
    def is_of_host(self) -> bool:
        """Whether a replacement of the host would be faster."""
        return self in (Cause.COMPUTE, Cause.NETWORK)


class VerdictConfidence(StrEnum):
    HIGH = "high"
    """Two independent signals agreed for long enough."""
    LOW = "low"
    """Only one signal, or only for a short time. Such a verdict is shown but never acted upon."""
    INSUFFICIENT = "insufficient"
    """No other rank does the same work, or there are too few observations."""


@dataclass(frozen=True, slots=True)
class HostVerdict:
    """One verdict. Ids sort by time; `round` is the round that it applies to."""

    verdict_id: str
    kind: VerdictKind
    round: int
    cause: Cause
    confidence: VerdictConfidence
    created_unix_s: float
    by: str
    """The daemon's session."""
    hosts: tuple[str, ...] = ()
    """Culprit hosts, the worst first."""
    ranks: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()
    """Sentences, the strongest first."""
    first_step: int | None = None
    last_step: int | None = None
    """The steps that the verdict is based on."""
    step_s: float | None = None
    """The current duration of a step."""
    gain_s_per_step: float = 0.0
    """How much faster a step would be if these hosts were as fast as their peers (what-if)."""
    rollback_to: int | None = None
    """NUMERICS: resume from a checkpoint of this step or an older one. At most skip_from."""
    skip_from: int | None = None
    skip_to: int | None = None
    """NUMERICS: the batches of steps skip_from to skip_to (both inclusive) are left out."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """By host: the robust score behind the verdict. Never NaN."""


class OutcomeKind(StrEnum):
    ACTED = "acted"
    WAITING = "waiting"
    """It waits for a person: `megatrain job approve --verdict ID`, or `dismiss`."""
    DRY_RUN = "dry-run"
    """The driver would have acted if it had been allowed to."""
    DECLINED = "declined"
    """Declined by a rule, which the reason names, or by a person."""


@dataclass(frozen=True, slots=True)
class VerdictOutcome:
    """The driver's decision on a verdict."""

    verdict_id: str
    kind: OutcomeKind
    reason: str
    driver: str
    at_unix_s: float
    incident: str = ""
    by: str = ""
    """The person who approved or dismissed it."""
    gain_s: float = 0.0
    """Expected gain over the rest of the job."""
    cost_s: float = 0.0
    """Cost of a restart: the time without a step, and that of the steps to repeat."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A line of the audit: an outcome, and the verdict at that time; None when it could not be read."""

    outcome: VerdictOutcome
    verdict: HostVerdict | None = None
