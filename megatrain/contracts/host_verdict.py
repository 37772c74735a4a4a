"""Verdicts: what the diagnosis says of a host or of the training itself, and what became of that.

The daemon's controller writes a HostVerdict, the driver alone decides and writes a VerdictOutcome. Both are kept: they
are the audit. A verdict holds for one round; of a later one it says nothing (DESIGN decisions 13, 14).
Steps are those of events, from 0: a checkpoint of step n holds what steps 0 to n - 1 made, and step n is trained next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class VerdictKind(StrEnum):
    STRAGGLER = "straggler"
    """A host, or the work it has, makes the job slow."""
    HANG = "hang"
    """Refines what the driver found by itself."""
    NUMERICS = "numerics"
    """Loss or gradient norm jumped, or is no number: go back, and leave out the batches that did it."""


class Cause(StrEnum):
    """Why something is slow. Only the first two go away with the host."""

    COMPUTE = "compute"
    NETWORK = "network"
    DATA = "data"
    GC = "gc"
    LENGTHS = "sequence-length"
    STAGE = "stage"
    """The partition of the model: all ranks of a stage are slow."""
    UNKNOWN = "unknown"

    @property
    def is_of_host(self) -> bool:
        """Whether another host in its place would be faster."""
        return self in (Cause.COMPUTE, Cause.NETWORK)


class VerdictConfidence(StrEnum):
    HIGH = "high"
    """Two independent signals agree, for long enough."""
    LOW = "low"
    """One signal, or for a short time. Shown, never acted upon."""
    INSUFFICIENT = "insufficient"
    """No other rank does the same work, or too little was seen."""


@dataclass(frozen=True, slots=True)
class HostVerdict:
    """One verdict. Ids sort by time; `round` is the round that it judges."""

    verdict_id: str
    kind: VerdictKind
    round: int
    cause: Cause
    confidence: VerdictConfidence
    created_unix_s: float
    by: str
    """The daemon's session."""
    hosts: tuple[str, ...] = ()
    """Culprits, the worst first."""
    ranks: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()
    """Sentences, the strongest first."""
    first_step: int | None = None
    last_step: int | None = None
    """Steps that were looked at."""
    step_s: float | None = None
    """A step takes so long now."""
    gain_s_per_step: float = 0.0
    """A step would take so much less with these hosts as fast as their peers (what-if)."""
    rollback_to: int | None = None
    """NUMERICS: resume from a checkpoint of this step or an older one; not after skip_from."""
    skip_from: int | None = None
    skip_to: int | None = None
    """NUMERICS: the batches of steps skip_from to skip_to (both inclusive) are left out."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """By host: the robust score that led here. Never NaN."""


class OutcomeKind(StrEnum):
    ACTED = "acted"
    WAITING = "waiting"
    """For a person: `megatrain job approve --verdict ID`, or `dismiss`."""
    DRY_RUN = "dry-run"
    """What would have been done, was it allowed."""
    DECLINED = "declined"
    """By a rule, which the reason names, or by a person."""


@dataclass(frozen=True, slots=True)
class VerdictOutcome:
    """What the driver made of a verdict."""

    verdict_id: str
    kind: OutcomeKind
    reason: str
    driver: str
    at_unix_s: float
    incident: str = ""
    by: str = ""
    """Who approved or dismissed it."""
    gain_s: float = 0.0
    """Expected over the rest of the job."""
    price_s: float = 0.0
    """Of a restart: the seconds without a step and the steps done again."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A line of the audit: an outcome, and the verdict as it was; None where it could not be read."""

    outcome: VerdictOutcome
    verdict: HostVerdict | None = None
