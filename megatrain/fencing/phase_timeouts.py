"""Finds ranks that make no progress. fence.py decides when a host without a lease stops its workers.

Each phase has its own limit. The limit of a step is learned: max(floor, factor x median step). Until a second step has
been completed, the duration of the first step replaces the median; the first step itself has a configured limit. The
first checkpoint and the first evaluation have configured limits too; the limits of later ones follow from the longest
earlier one. A rank's silence counts from its newest sign of life: it entered a phase, began a step or completed one. A
rank that waits for storage records signs of life. Pure functions: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from megatrain.contracts.black_box.values import Phase, Progress
from megatrain.contracts.records.host_records import Stall
from megatrain.fencing.fence import step_ns_of

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimeouts:
    """How long each phase may go without a sign of life."""

    init_s: float
    first_step_s: float
    checkpoint_s: float
    evaluation_s: float
    floor_s: float
    factor: float

    def limit_s(self, progress: Progress) -> float:
        """Return how long this rank may be silent now."""
        match progress.phase:
            case Phase.INIT:
                return self.init_s
            case Phase.FIRST_STEP:
                return self.first_step_s
            case Phase.STEP:
                typical_ns = step_ns_of(progress)
                if typical_ns is None:
                    return self.first_step_s
                learned_s = max(self.floor_s, self.factor * typical_ns / _NS)
                return learned_s if progress.median_step_ns else min(self.first_step_s, learned_s)
            case Phase.EVALUATION:
                return self._learned_s(self.evaluation_s, progress.longest_evaluation_ns)
            case Phase.CHECKPOINT:
                return self._learned_s(self.checkpoint_s, progress.longest_checkpoint_ns)
            case Phase.STOPPING:
                return self.checkpoint_s

    def scaled(self, factor: float) -> PhaseTimeouts:
        """Return timeouts that are `factor` times as long."""
        return PhaseTimeouts(**{name: factor * value for name, value in asdict(self).items()})

    def _learned_s(self, max_s: float, longest_ns: int | None) -> float:
        """Return the limit of a phase that took at most `longest_ns` before; `max_s` if it is the first time."""
        return max_s if longest_ns is None else min(max_s, max(self.floor_s, self.factor * longest_ns / _NS))


def silent_s(progress: Progress, now_ns: int) -> float:
    """Return how long a rank has shown no sign of life in its black box."""
    newest = max(progress.phase_since_ns, progress.step_started_ns or 0, progress.completed_ns or 0)
    return max(0.0, (now_ns - newest) / _NS)


def find_stall(
    ranks: Mapping[int, Progress], phase_timeouts: PhaseTimeouts, now_ns: int, now_unix_s: float
) -> Stall | None:
    """Return the stall, with all ranks beyond their limit and the phase and step of the longest silent one, or None."""
    silences = {rank: silent_s(progress, now_ns) for rank, progress in ranks.items()}
    over = {rank: silence for rank, silence in silences.items() if silence > phase_timeouts.limit_s(ranks[rank])}
    if not over:
        return None
    longest = max(over, key=lambda rank: (over[rank], -rank))
    progress = ranks[longest]
    return Stall(
        phase=progress.phase.name.lower().replace("_", "-"),
        step=-1 if progress.current_step is None else progress.current_step,
        silent_s=round(over[longest], 3),
        limit_s=round(phase_timeouts.limit_s(progress), 3),
        at_unix_s=now_unix_s,
        ranks=tuple(sorted(over)),
    )
