"""The driver's report for people: what it waits for or watches, and what an operator should mend."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DriverReport:
    """The driver's newest decision in words. Written when it changes, not oftener than once a second."""

    driver: str
    reason: str
    since_unix_s: float
    alarms: tuple[str, ...] = ()
    """A hold, records that cannot be read, an etcd that has no room."""
    removed: tuple[str, ...] = ()
    """Directories of the run that somebody removed lately, and what is lost with each."""
    checkpoint_damage: str = ""
    """Why a job would not go on from the newest committed checkpoint, and from which it would."""
