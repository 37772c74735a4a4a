"""Computes the fraction of a job's time that was spent in steps that count (were not repeated), for any interval.

The terms are those of megatrain_job.jobs.lost_time, by which the driver computes the ratio of the whole job. Incidents
have only the number of repeated steps. Events are more exact: all time between the last step that counts and the first
step of the next round is lost, including gaps between launches. Source: MegaScale sec. 6.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatrain.contracts.records.incident import Incident
from megatrain_job.jobs.lost_time import Interval, covered_s, median_of, once_a_round, recoveries


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart, from events. Units: unix seconds."""

    round: int
    """The round that ended."""
    begin_s: float
    """End of the last step of that round that counts."""
    end_s: float
    """Start of the first step of the next round."""


def effective_time_ratio(
    incidents: Sequence[Incident], restarts: Iterable[Restart], begin_s: float, end_s: float
) -> float | None:
    """Return training time divided by all time from `begin_s` to `end_s` (unix seconds); None for an empty interval."""
    if end_s <= begin_s:
        return None
    lost = covered_s(lost_times(incidents, restarts, end_s), begin_s, end_s)
    return min(1.0, max(0.0, 1.0 - lost / (end_s - begin_s)))


def lost_times(incidents: Sequence[Incident], restarts: Iterable[Restart], now_s: float) -> list[Interval]:
    """Return the intervals without steps that count, in unix seconds; they may overlap."""
    seen = list(restarts)
    known = {restart.round for restart in seen}
    lost = recoveries(incidents, now_s)
    lost += [(restart.begin_s, restart.end_s) for restart in seen]
    for incident in once_a_round(incidents):
        if incident.round not in known and incident.steps_lost:
            began_s = incident.moments.began
            lost.append((began_s - incident.steps_lost * median_of(incident), began_s))
    return lost
