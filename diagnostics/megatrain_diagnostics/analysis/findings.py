"""The results of the search for stragglers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.records.host_verdict import Cause, VerdictConfidence


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Values from which something is called a straggler. Their meaning is that of section [diagnostics]."""

    excess: float = 0.1
    score: float = 3.5
    num_steps: int = 8


def thresholds_of(config: DiagnosticsConfig) -> Thresholds:
    """Return the thresholds of a job."""
    return Thresholds(config.straggler_excess, config.straggler_score, config.straggler_steps)


@dataclass(frozen=True, slots=True)
class Finding:
    """A rank, stage, host or network that makes the job slow. Units: seconds a step."""

    cause: Cause
    confidence: VerdictConfidence
    ranks: tuple[int, ...]
    """Culprits, the worst first; for a slow stage, all of its ranks."""
    hosts: tuple[str, ...]
    """Hosts of those ranks, the worst first; for a slow network, the hosts that may be the cause."""
    first_step: int
    """The step at which it was first seen."""
    last_step: int
    num_steps: int
    """Number of compared steps between these two, of which `num_seen` showed it."""
    num_seen: int
    excess: float
    """Excess of the worst rank over its peers, as a fraction of the stage's compute in a step."""
    excess_s: float
    score: float
    """Score of the worst rank: its excess over the spread of peers and of time."""
    wait_deficit_s: float
    """How much less the worst rank waits for others than its peers do."""
    num_peers: int
    victims: tuple[int, ...]
    """Some of the ranks that wait for the worst rank, in the order of their waits, the longest first."""
    num_victims: int
    step_s: float
    """Present duration of a step."""
    gain_s: float
    """Upper bound of the time that a step would gain if the culprits were as fast as their peers."""
    evidence: tuple[str, ...]
    scores: Mapping[str, float] = field(default_factory=dict)
    """Host of a culprit -> greatest score of those of `ranks` that are on it."""
    rank_scores: tuple[float, ...] = ()
    """Scores of `ranks`, in their order; empty where no rank is compared with its peers."""
    stage: int | None = None

    @property
    def key(self) -> str:
        """Identity of the finding over later steps."""
        return (
            straggler_key(self.cause, self.hosts, ())
            if self.stage is None
            else straggler_key(self.cause, (), self.ranks)
        )


def straggler_key(cause: Cause, hosts: Sequence[str], stage_ranks: Sequence[int]) -> str:
    """Return a finding's identity: the cause, and the culprit hosts in any order, or a stage by its first rank."""
    of = ",".join(sorted(hosts)) if not stage_ranks else f"ranks from {min(stage_ranks)}"
    return f"{cause.value}:{of}"


@dataclass(frozen=True, slots=True)
class StragglerAssessment:
    """The findings at present, and the steps and ranks that were not judged."""

    findings: tuple[Finding, ...] = ()
    unjudged_ranks: tuple[int, ...] = ()
    """Ranks whose work no other rank shares."""
    silent_ranks: tuple[int, ...] = ()
    """Ranks without any event in the steps of the search."""
    first_step: int | None = None
    last_step: int | None = None
    num_steps: int = 0
    """Number of compared steps."""
    num_left_out: int = 0
    """Steps left out: the first ones, and those around checkpoints and evaluations."""

    is_enough: bool = False
    """Whether enough steps were seen that an empty result means that no rank is slow."""
    thresholds: Thresholds | None = None
    """Thresholds that were applied; `score` is raised for the number of ranks. None: no step was compared."""
    scores: tuple[float, ...] = ()
    """By rank, from `scores.rank_scores`; empty while too few steps are there."""
    host_scores: Mapping[str, float] = field(default_factory=dict)
    """By host, from `scores.host_scores`."""
