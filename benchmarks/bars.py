"""Bars: the greatest or least allowed value of a figure. A benchmark reports a figure beyond its bar and fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def at_most(what: str, found: float, bar: float) -> list[str]:
    """Return a sentence when `found` is above `bar`, or NaN."""
    return [] if found <= bar else [f"{what} is {found:,.4g}; it must be at most {bar:,.4g}"]


def at_least(what: str, found: float, bar: float) -> list[str]:
    """Return a sentence when `found` is below `bar`, or NaN."""
    return [] if found >= bar else [f"{what} is {found:,.4g}; it must be at least {bar:,.4g}"]


def must_hold(what: str, holds: bool) -> list[str]:
    """Return `what` as a sentence when it does not hold."""
    return [] if holds else [f"this does not hold: {what}"]


_LIMITS: Mapping[str, Callable[[str, float, float], list[str]]] = {"<=": at_most, ">=": at_least}


def as_written(what: str, found: float, bar: str) -> list[str]:
    """Return a sentence when `found` is beyond `bar`, which is in the form of a table: "<= 1.3", ">= 0.8", or empty."""
    if not bar or bar == "-":
        return []
    sign, limit = bar.split(" ", 1)
    return _LIMITS[sign](what, found, float(limit))
