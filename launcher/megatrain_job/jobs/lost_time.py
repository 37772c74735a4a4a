"""The cost of incidents to a job: time without a step, and steps that were repeated. Pure functions.

A step counts if it was not repeated later. The lost time is the time from each failure to the next completed step, plus
the time of the first execution of steps that were repeated. All other time of a job is its training time: the time in
steps that count. Its fraction of all time is the effective time ratio (MegaScale sec. 6.3).

The driver and the dashboard compute the cost of a restart with these functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState

MEDIAN_NOTE = "median_step_s"
"""Name of the incident's note with the median duration of a step when the incident began."""
_MAX_INCIDENTS = 10
"""The number of newest recoveries that determine the present cost of a restart."""

Interval = tuple[float, float]
"""Begin and end, unix seconds."""


def median_of(incident: Incident) -> float:
    """Return the median duration of a step when an incident began, in seconds; 0 if unknown."""
    try:
        return float(incident.notes.get(MEDIAN_NOTE, "0"))
    except ValueError:
        return 0.0


def measured_restart_cost_s(incidents: Iterable[Incident]) -> float | None:
    """Return the median cost of the newest recoveries in seconds; None before the first."""
    costs = [cost for incident in incidents if (cost := _cost_s(incident)) is not None]
    return median(costs[-_MAX_INCIDENTS:]) if costs else None


def effective_time_ratio(incidents: Sequence[Incident], begin: float, now: float) -> float | None:
    """Return the fraction of the time since `begin` that was training time; None before any time has passed.

    Overlapping recoveries count once.
    """
    if now <= begin:
        return None
    lost_s = covered_s(recoveries(incidents, now), begin, now)
    lost_s += sum((incident.steps_lost or 0) * median_of(incident) for incident in once_a_round(incidents))
    return round(min(1.0, max(0.0, 1.0 - lost_s / (now - begin))), 6)


def recoveries(incidents: Iterable[Incident], now: float) -> list[Interval]:
    """Return the interval from each failure to the next completed step, or to `now` if there is none yet."""
    return [
        (incident.moments.began, now if incident.moments.first_step is None else incident.moments.first_step)
        for incident in incidents
        if incident.state is not IncidentState.HELD
    ]


def covered_s(intervals: Iterable[Interval], begin: float, end: float) -> float:
    """Return the seconds from `begin` to `end` that at least one of the intervals covers."""
    total_s, reached = 0.0, begin
    for first, last in sorted(intervals):
        total_s += max(0.0, min(last, end) - max(first, reached))
        reached = max(reached, min(last, end))
    return total_s


def once_a_round(incidents: Iterable[Incident]) -> list[Incident]:
    """Return one incident for each broken round: its steps were lost once."""
    return list(
        {incident.round: incident for incident in incidents if incident.state is not IncidentState.HELD}.values()
    )


def _cost_s(incident: Incident) -> float | None:
    moments = incident.moments
    if incident.state is not IncidentState.RECOVERED or moments.first_step is None:
        return None
    if incident.kind in (IncidentKind.NUMERICS, IncidentKind.LAUNCH_LOST) or incident.rollback is not None:
        return None  # the length of a rollback, or the time until a new launch, does not predict other restarts
    return max(0.0, moments.first_step - moments.began) + (incident.steps_lost or 0) * median_of(incident)
