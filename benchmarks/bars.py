"""Bars: the least or greatest allowed value of a figure. A benchmark that misses one fails, and its page shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure beside what is allowed.

    `found`: the figure, or whether `figure` holds. `bar`: "<= 1.3", ">= 0.5", or "yes" for what must hold.
    """

    figure: str
    found: float | bool
    bar: str
    is_met: bool

    def row(self) -> dict[str, str | float]:
        """Return the bar as a row of a table."""
        found = self.found if not isinstance(self.found, bool) else _yes(self.found)
        return {"figure": self.figure, "found": found, "bar": self.bar, "met": _yes(self.is_met)}


def at_most(figure: str, found: float, bar: float) -> Bar:
    """Return a bar that is missed if `found` is above `bar` or NaN."""
    return Bar(figure, found, f"<= {bar:g}", found <= bar)


def at_least(figure: str, found: float, bar: float) -> Bar:
    """Return a bar that is missed if `found` is below `bar` or NaN."""
    return Bar(figure, found, f">= {bar:g}", found >= bar)


def must_hold(figure: str, holds: bool) -> Bar:
    """Return a bar for a statement."""
    return Bar(figure, bool(holds), "yes", bool(holds))


_LIMITS: Mapping[str, Callable[[str, float, float], Bar]] = {"<=": at_most, ">=": at_least}


def as_written(figure: str, found: float, bar: str) -> list[Bar]:
    """Return the bar that a table states as "<= 1.3" or ">= 0.8"; none where it is empty or "-"."""
    if not bar or bar == "-":
        return []
    sign, limit = bar.split(" ", 1)
    return [_LIMITS[sign](figure, found, float(limit))]


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
