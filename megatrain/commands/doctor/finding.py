"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    ABSENT = "absent"
    """An optional part is not here: something is not possible, training is."""
    WARNING = "warning"
    """Training runs, but something here will hurt it or mislead somebody."""
    FATAL = "fatal"
    """The trainer cannot run."""

    @property
    def mark(self) -> str:
        return {Level.OK: "ok", Level.ABSENT: "--", Level.WARNING: "!!", Level.FATAL: "XX"}[self]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and what follows from it (empty when nothing does)."""

    name: str
    state: str
    consequence: str = ""
    level: Level = Level.OK
