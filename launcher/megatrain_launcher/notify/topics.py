"""What a message reports about a job: its topics.

A topic is one thing that begins and ends: an incident, a verdict that waits, a reason why the job is not green. A
message contains a topic's present state, not its changes, so it can be sent to a new receiver at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from megatrain_job.jobs.health import HealthLevel
from megatrain_job.jobs.incident_phrases import where_text

NO_ACTION = "no action is needed"
_LEVELS = tuple(HealthLevel)


class Event(StrEnum):
    """The kind of a topic, as `events` of a receiver names it."""

    INCIDENT = "incident"
    RESTARTS = "restarts"
    END = "end"
    VERDICT = "verdict"
    HEALTH = "health"
    TEST = "test"
    """Sent by `megatrain notify test`; no receiver can switch it off."""


class Stage(StrEnum):
    """The progress of a topic."""

    OPEN = "open"
    UNDER_WAY = "under-way"
    """The job is recovering by itself."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One thing to report, in its present state."""

    name: str
    """Unique in the job, permanently."""
    event: Event
    level: HealthLevel
    stage: Stage
    what: str
    """A sentence on the event, without its full stop."""
    began_unix_s: float
    ready_unix_s: float
    """The topic is not sent before this time, because it may soon be over, or more may become known."""
    ended_unix_s: float | None = None
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    step: int | None = None
    """The last step that was completed before the topic began."""
    cost: str = ""
    """Time and steps lost, as far as they are known."""
    activity: str = ""
    """The present activity of the job."""
    action: str = ""
    """The person or program that must act, and the action."""
    runbook: str = ""
    """A page of docs/runbooks."""
    route: str = ""
    """The dashboard page that shows more."""

    @property
    def mark(self) -> str:
        """The part of the message that a receiver's record keeps: stage and level."""
        return f"{self.stage}:{self.level}"

    @property
    def where(self) -> str:
        return where_text(self.hosts, self.ranks)


def is_at_least(level: HealthLevel, least: HealthLevel) -> bool:
    """Return whether a level is at least as bad as another."""
    return _LEVELS.index(level) >= _LEVELS.index(least)


def worst_level(topics: Iterable[Topic]) -> HealthLevel:
    """Return the worst level of topics; green if there are none."""
    return max((topic.level for topic in topics), key=_LEVELS.index, default=HealthLevel.GREEN)


_GONE_TEXTS = {
    Event.INCIDENT: "the incident is no longer kept",
    Event.RESTARTS: "less than half of the restarts are used",
    Event.END: "the job was started again",
    Event.VERDICT: "the verdict no longer waits: it was answered, or its round is over",
    Event.HEALTH: "the reason no longer holds",
    Event.TEST: "the test is over",
}


def gone_topic(name: str, mark: str, now_s: float) -> Topic:
    """Return the end of a topic that no longer exists. `mark`: the mark of the last message about it."""
    kind, _, rest = name.partition("/")
    event = Event(kind) if kind in set(Event) else Event.HEALTH
    level = mark.partition(":")[2]
    what = f"{rest.replace('-', ' ')}: {_GONE_TEXTS[event]}" if event is Event.HEALTH else _GONE_TEXTS[event]
    return Topic(
        name=name,
        event=event,
        level=HealthLevel(level) if level in set(HealthLevel) else HealthLevel.AMBER,
        stage=Stage.CLOSED,
        what=what,
        began_unix_s=now_s,
        ready_unix_s=0.0,
        ended_unix_s=now_s,
        activity=_GONE_TEXTS[event],
        action=NO_ACTION,
    )
