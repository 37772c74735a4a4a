"""The number of a job's allowed restarts that are used, for the driver's restart limit and for the job's health."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.contracts.records.incident import Incident, IncidentKind

HOUR_S = 3600.0
_AUTOMATIC = frozenset({"restart", "evict", "rollback"})
_UNPLANNED = frozenset({IncidentKind.FAILURE, IncidentKind.HANG, IncidentKind.HOST_LOST})
"""Kinds of incidents that broke a round; other kinds have separate limits."""
_PER_HOUR, _WITHOUT_PROGRESS = "recovery.restarts_per_hour", "recovery.restarts_without_progress"


@dataclass(frozen=True, slots=True)
class RestartBudget:
    """Restarts that no person requested. `recent`: within the last hour.

    `without_new_step`: the newest restarts in a row after which no new step was completed. `per_hour` and
    `without_progress`: how many of each are allowed.
    """

    recent: tuple[Incident, ...]
    without_new_step: tuple[Incident, ...]
    per_hour: int
    without_progress: int

    @property
    def is_used_up(self) -> bool:
        """Whether the next failure ends the job."""
        return self._reaches(1)

    @property
    def is_half_used(self) -> bool:
        return self._reaches(2)

    def _reaches(self, parts: int) -> bool:
        """Return whether at least 1/`parts` of a limit is used."""
        pairs = ((self.recent, self.per_hour), (self.without_new_step, self.without_progress))
        return any(used and parts * len(used) >= limit for used, limit in pairs)

    def text(self) -> str:
        """Return how many restarts are used, for the limit that is more nearly reached."""
        if len(self.recent) * self.without_progress >= len(self.without_new_step) * self.per_hour:
            verb = "is" if len(self.recent) == 1 else "are"
            return f"{len(self.recent)} of {self.per_hour} restarts within an hour {verb} used ({_PER_HOUR})"
        verb = "has" if len(self.without_new_step) == 1 else "have"
        return (
            f"{len(self.without_new_step)} of {self.without_progress} restarts in a row {verb} led to no new step "
            f"({_WITHOUT_PROGRESS})"
        )


def restart_budget(
    incidents: Sequence[Incident], last_step: int | None, now_s: float, *, per_hour: int, without_progress: int
) -> RestartBudget:
    """Return how many restarts are used.

    incidents: those of the current launch, oldest first. last_step: newest completed step.
    """
    restarts = [incident for incident in incidents if is_automatic(incident)]
    recent = tuple(restart for restart in restarts if restart.moments.detected >= now_s - HOUR_S)
    return RestartBudget(recent, _without_new_step(restarts, last_step), per_hour, without_progress)


def configured_budget(
    config: Mapping[str, str], incidents: Sequence[Incident], last_step: int | None, now_s: float
) -> RestartBudget | None:
    """Return `restart_budget` with the limits in a job's record; None if the record has no limits."""
    per_hour, without_progress = (config.get(name, "") for name in (_PER_HOUR, _WITHOUT_PROGRESS))
    if not (_is_limit(per_hour) and _is_limit(without_progress)):
        return None
    return restart_budget(
        incidents, last_step, now_s, per_hour=int(per_hour), without_progress=int(without_progress)
    )  # fmt: skip


def is_automatic(incident: Incident) -> bool:
    """Return whether the job was restarted without a request."""
    return incident.kind in _UNPLANNED and incident.action in _AUTOMATIC


def step_of(step: int | None) -> int:
    """Return a step number that can be compared: None becomes -1, which is less than every step."""
    return -1 if step is None else step


def _is_limit(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def _without_new_step(restarts: Sequence[Incident], last_step: int | None) -> tuple[Incident, ...]:
    """Return the consecutive restarts, up to now, after which no new step was completed."""
    best, streak = -1, list[Incident]()
    for incident in restarts:
        step = step_of(incident.last_step)
        if step > best:
            best, streak = step, []
        streak.append(incident)
    return () if step_of(last_step) > best else tuple(streak)
