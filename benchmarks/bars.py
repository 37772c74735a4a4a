"""Bars: what a figure may be at most or at least. A benchmark that finds one beyond its bar says so and fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def at_most(what: str, found: float, bar: float) -> list[str]:
    """Return a sentence when `found` is above `bar`, or no number."""
    return [] if found <= bar else [f"{what} is {found:,.4g}; it may be {bar:,.4g} at most"]


def at_least(what: str, found: float, bar: float) -> list[str]:
    """Return a sentence when `found` is below `bar`, or no number."""
    return [] if found >= bar else [f"{what} is {found:,.4g}; it must be {bar:,.4g} at least"]


def must_hold(what: str, holds: bool) -> list[str]:
    """Return `what` as a sentence when it does not hold."""
    return [] if holds else [f"this does not hold: {what}"]


_LIMITS: Mapping[str, Callable[[str, float, float], list[str]]] = {"<=": at_most, ">=": at_least}


def as_written(what: str, found: float, bar: str) -> list[str]:
    """Return a sentence when `found` does not keep `bar` as a table writes it: "<= 1.3", ">= 0.8", or nothing."""
    if not bar or bar == "-":
        return []
    sign, limit = bar.split(" ", 1)
    return _LIMITS[sign](what, found, float(limit))
