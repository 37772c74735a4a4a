"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

NOT_COMPILED = "not compiled: there was no C compiler when megatrain was installed"


class FindingLevel(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    ABSENT = "absent"
    """An optional part is missing: a feature is not available, but training works."""
    WARNING = "warning"
    """Training works, but something here slows it down or misleads its users."""
    FATAL = "fatal"
    """Training does not work."""

    @property
    def mark(self) -> str:
        return _MARKS[self]


_MARKS = {FindingLevel.OK: "ok", FindingLevel.ABSENT: "--", FindingLevel.WARNING: "!!", FindingLevel.FATAL: "XX"}


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """The examined part, its state, and the consequence (empty without one)."""

    name: str
    state: str
    consequence: str = ""
    level: FindingLevel = FindingLevel.OK
