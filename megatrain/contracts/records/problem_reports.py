"""Reports for operators: the driver's report, and problems of parts of a job other than hosts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DriverReport:
    """The driver's newest decision as text. Written when it changes, at most once a second."""

    driver: str
    reason: str
    since_unix_s: float
    alarms: tuple[str, ...] = ()
    """Such as a hold, records that cannot be read, or an etcd that is full."""
    removed: tuple[str, ...] = ()
    """Directories of the run that were removed recently, and what was lost with each."""
    checkpoint_damage: str = ""
    """Why a restarted job would not resume from the newest committed checkpoint, and from which checkpoint it would."""


@dataclass(frozen=True, slots=True)
class JobProblem:
    """A problem that needs a person now. The key is removed when the problem is over."""

    source: str
    """The affected part."""
    text: str
    """Complete sentences, for people."""
    since_unix_s: float
    """When it was reported."""
