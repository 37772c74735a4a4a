"""How much of a job's time went into steps that count: over all of it, and over any part of it.

Lost is the time from each failure to the next completed step, and that of steps that were done again, when they were
done first; what is lost twice over counts once. It is the driver's definition (megatrain.jobs.lost_time), which knows
of steps only how many were lost. Where events tell of the last step that counts and of the first one after it, all that
lies between is lost: so the ratio of the last hour holds what was lost within it, and launches may lie apart.
Source: MegaScale sec. 6.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatrain.contracts.incident import Incident
from megatrain.jobs.lost_time import Interval, covered_s, median_of, once_a_round, recoveries


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart as events tell of it, in unix seconds."""

    round: int
    """That ended."""
    begin_s: float
    """End of its last step that counts."""
    end_s: float
    """Begin of the first step of the next one."""


def effective_time_ratio(
    incidents: Sequence[Incident], restarts: Iterable[Restart], begin_s: float, end_s: float
) -> float | None:
    """Return the part of the time from `begin_s` to `end_s` that was not lost; None where that is no time."""
    if end_s <= begin_s:
        return None
    lost = covered_s(lost_times(incidents, restarts, end_s), begin_s, end_s)
    return min(1.0, max(0.0, 1.0 - lost / (end_s - begin_s)))


def lost_times(incidents: Sequence[Incident], restarts: Iterable[Restart], now_s: float) -> list[Interval]:
    """Return the times in which nothing was done that counts; they may overlap."""
    seen = list(restarts)
    known = {one.round for one in seen}
    lost = recoveries(incidents, now_s)
    lost += [(one.begin_s, one.end_s) for one in seen]
    for one in once_a_round(incidents):
        if one.round not in known and one.steps_lost:
            began_s = one.moments.began
            lost.append((began_s - one.steps_lost * median_of(one), began_s))
    return lost
