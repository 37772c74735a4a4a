"""What the search for stragglers comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.host_verdict import Cause, VerdictConfidence


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When something is called a straggler: from these values on. The meaning is that of section [diagnostics]."""

    excess: float = 0.1
    score: float = 3.5
    num_steps: int = 8


def thresholds_of(config: DiagnosticsConfig) -> Thresholds:
    """Return the thresholds of a job."""
    return Thresholds(config.straggler_excess, config.straggler_score, config.straggler_steps)


@dataclass(frozen=True, slots=True)
class Finding:
    """Somebody, or something, that makes the job slow. Units: seconds a step."""

    cause: Cause
    confidence: VerdictConfidence
    ranks: tuple[int, ...]
    """Culprits, the worst first; of a whole stage its ranks."""
    hosts: tuple[str, ...]
    """Of those ranks, the worst first; of a slow network those that may be it."""
    first_step: int
    """It was first seen at."""
    last_step: int
    num_steps: int
    """Steps that were compared between these, of which it was seen in `num_seen`."""
    num_seen: int
    excess: float
    """Of the worst over its peers, as a part of what the stage computes in a step."""
    excess_s: float
    score: float
    """Of the worst: excess over the spread of peers and of time."""
    wait_deficit_s: float
    """The worst waits so much less for others than its peers do."""
    num_peers: int
    victims: tuple[int, ...]
    """Ranks that wait for it, a few of them; the worst off first."""
    num_victims: int
    step_s: float
    """A step takes so long now."""
    gain_s: float
    """A step would be shorter by so much at most, were the culprits as fast as their peers."""
    evidence: tuple[str, ...]
    scores: Mapping[str, float] = field(default_factory=dict)
    """By host of a culprit: the greatest score of those of `ranks` that are on it."""
    rank_scores: tuple[float, ...] = ()
    """Of `ranks`, in their order; empty where no rank is compared with its peers."""
    stage: int | None = None

    @property
    def key(self) -> str:
        """What makes it the same finding in a later step."""
        return (
            straggler_key(self.cause, self.hosts, ())
            if self.stage is None
            else straggler_key(self.cause, (), self.ranks)
        )


def straggler_key(cause: Cause, hosts: Sequence[str], stage_ranks: Sequence[int]) -> str:
    """Return what tells findings apart: the cause, and the culprit hosts in any order or a stage by its first rank."""
    of = ",".join(sorted(hosts)) if not stage_ranks else f"ranks from {min(stage_ranks)}"
    return f"{cause.value}:{of}"


@dataclass(frozen=True, slots=True)
class Assessment:
    """What is known now."""

    findings: tuple[Finding, ...] = ()
    unjudged_ranks: tuple[int, ...] = ()
    """No other rank does the same work as these."""
    silent_ranks: tuple[int, ...] = ()
    """Nothing came from these in the steps that were looked at."""
    first_step: int | None = None
    last_step: int | None = None
    num_steps: int = 0
    """That were compared."""
    num_left_out: int = 0
    """First steps, and those around checkpoints and evaluations."""

    is_enough: bool = False
    """Enough was seen that an empty result means that no rank is slow."""
    thresholds: Thresholds | None = None
    """Those that held; `score` is the one that counts among so many ranks. None: nothing was looked at."""
    scores: tuple[float, ...] = ()
    """By rank, as `scores.rank_scores` has it; empty while too few steps are there."""
    host_scores: Mapping[str, float] = field(default_factory=dict)
    """As `scores.host_scores` has it."""
