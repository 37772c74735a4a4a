"""Data classes for the results of straggler detection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.records.host_verdict import Cause, VerdictConfidence


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Least values for which a rank is a straggler: straggler_excess, _score and _steps of section [diagnostics]."""

    excess: float = 0.1
    score: float = 3.5
    num_steps: int = 8


def thresholds_of(config: DiagnosticsConfig) -> Thresholds:
    """Return the thresholds of a job."""
    return Thresholds(config.straggler_excess, config.straggler_score, config.straggler_steps)


@dataclass(frozen=True, slots=True)
class Finding:
    """A rank, stage, host or network that makes the job slow. Units: seconds per step."""

    cause: Cause
    confidence: VerdictConfidence
    ranks: tuple[int, ...]
    """Culprits, the worst first; for a slow stage, all of its ranks; for a slow network, some ranks of the slow
    groups."""
    hosts: tuple[str, ...]
    """Hosts of the culprits, for slow ranks the worst first; for a slow network, the hosts that may be the cause; none
    if another rank is slow in each step."""
    first_step: int
    """The first step of the slowness."""
    last_step: int
    num_steps: int
    """Number of compared steps from `first_step` to `last_step`; `num_seen` of them were slow."""
    num_seen: int
    excess: float
    """Excess of the worst rank over its peers, as a fraction of the stage's compute in a step."""
    excess_s: float
    score: float
    """Score of the worst rank: its excess divided by the noise (see `candidates`)."""
    wait_deficit_s: float
    """The time by which the worst rank waits less for others than its peers do."""
    num_peers: int
    victims: tuple[int, ...]
    """Some of the ranks that wait for the worst rank, the longest wait first."""
    num_victims: int
    step_s: float
    """Current duration of a step."""
    gain_s: float
    """Upper bound of how much shorter a step would be if the culprits were as fast as their peers."""
    evidence: tuple[str, ...]
    scores: Mapping[str, float] = field(default_factory=dict)
    """Host of a culprit -> greatest score of its ranks in `ranks`."""
    rank_scores: tuple[float, ...] = ()
    """Scores of `ranks`, in the same order; empty if ranks were not compared with peers."""
    stage: int | None = None

    @property
    def key(self) -> str:
        """The key by which later steps recognize the finding."""
        return (
            straggler_key(self.cause, self.hosts, ())
            if self.stage is None
            else straggler_key(self.cause, (), self.ranks)
        )


def greatest_by_host(scores: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return host -> the greatest of its scores, at least 0, in the order of the hosts; host "" is left out."""
    found: dict[str, float] = {}
    for host, score in scores:
        if host:
            found[host] = max(score, found.get(host, 0.0))
    return found


def straggler_key(cause: Cause, hosts: Sequence[str], stage_ranks: Sequence[int]) -> str:
    """Return the key of a finding: its cause, and the sorted culprit hosts, or the first rank of a stage."""
    of = ",".join(sorted(hosts)) if not stage_ranks else f"ranks from {min(stage_ranks)}"
    return f"{cause.value}:{of}"


@dataclass(frozen=True, slots=True)
class StragglerAssessment:
    """The current findings, and the steps and ranks that were not compared."""

    findings: tuple[Finding, ...] = ()
    ranks_without_peers: tuple[int, ...] = ()
    """Ranks that are compared with no other rank, because none does the same work."""
    silent_ranks: tuple[int, ...] = ()
    """Ranks without any event in the steps of the search."""
    first_step: int | None = None
    last_step: int | None = None
    num_steps: int = 0
    """Number of compared steps."""
    num_left_out: int = 0
    """Number of steps left out: the first steps, and those with checkpoints or evaluations."""

    is_enough: bool = False
    """Whether enough steps were compared and each rank has peers. If so, and `findings` is empty, no rank is slow."""
    thresholds: Thresholds | None = None
    """Thresholds that were applied, with `score` raised for the number of ranks. None: no step was compared."""
    scores: tuple[float, ...] = ()
    """By rank, from `live.rank_scores`; empty while there are too few steps."""
    host_scores: Mapping[str, float] = field(default_factory=dict)
    """By host, from `live.host_scores`."""
