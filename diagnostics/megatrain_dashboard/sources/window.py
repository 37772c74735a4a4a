"""The part of a run that views show, given by steps or by time. Each is converted to the other. No I/O and no clock.

A bound is a step ("1200"), a moment with its zone ("2026-11-23T09:30:00Z"), or, for the start, a time before the newest
moment ("-15m", "-6h", "-1d"). The series of steps converts between steps and times; a step belongs to the time at which
it ended.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from megatrain.contracts.errors import UsageError
from megatrain_dashboard.sources.series_builder import SeriesSnapshot
from megatrain_diagnostics.events.tables import Float64
from megatrain_job.jobs.notes import moment

_STEP = re.compile(r"[0-9]{1,10}", re.ASCII)
_BEFORE = re.compile(r"-([0-9]{1,6})([smhd])", re.ASCII)
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LARGEST_STEP = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of a requested range. At most one of its fields is set."""

    step: int | None = None
    at_s: float | None = None
    before_s: float | None = None
    """Seconds before the newest moment."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a run, both ends included; None: no bound. `last_step` before `first_step`: no step ended in it."""

    first_step: int | None = None
    last_step: int | None = None
    begin_s: float | None = None
    end_s: float | None = None

    @property
    def is_whole(self) -> bool:
        return self == Window()

    @property
    def has_no_step(self) -> bool:
        return self.first_step is not None and self.last_step is not None and self.first_step > self.last_step

    def holds(self, begin_s: float | None, end_s: float | None = None) -> bool:
        """Return whether the window overlaps an event from `begin_s` to `end_s`.

        `end_s` None: the event is a moment. `begin_s` None: its time is not known, and it counts as inside.
        """
        if begin_s is None:
            return True
        last_s = begin_s if end_s is None else end_s
        return (self.begin_s is None or last_s >= self.begin_s) and (self.end_s is None or begin_s <= self.end_s)

    def holds_step(self, step: int) -> bool:
        return (self.first_step is None or step >= self.first_step) and (
            self.last_step is None or step <= self.last_step
        )


WHOLE_RUN = Window()


def bound_of(text: str, *, is_begin: bool) -> Bound | None:
    """Return the bound that a text names; None for an empty text. Raises: UsageError."""
    if not text:
        return None
    if _STEP.fullmatch(text):
        return Bound(step=min(int(text), _LARGEST_STEP))
    before = _BEFORE.fullmatch(text)
    if before is not None:
        if not is_begin:
            raise UsageError("a time before now can only begin a range; leave the end empty")
        return Bound(before_s=int(before[1]) * _UNIT_S[before[2]])
    try:
        return Bound(at_s=moment(text))
    except UsageError:
        raise UsageError("expected a step, a time with its zone as 2026-11-23T09:30:00Z, or -15m, -6h, -1d") from None


def window_of(begin: Bound | None, end: Bound | None, series: SeriesSnapshot, newest_s: float) -> Window:
    """Return the window between two bounds. `newest_s`: the moment from which times like "-15m" are counted back.

    Raises: UsageError where the end comes before the start.
    """
    if begin is None and end is None:
        return Window()
    clock = StepClock(series)
    begin_s = _begin_s(begin, clock, newest_s)
    end_s = _end_s(end, clock)
    first = begin.step if begin is not None and begin.step is not None else clock.first_ended_from(begin_s)
    last = end.step if end is not None and end.step is not None else clock.last_ended_by(end_s)
    if _is_turned(begin_s, end_s) or (_is_step(begin) and _is_step(end) and _is_turned(first, last)):
        raise UsageError("the range ends before it begins")
    return Window(first, last, begin_s, end_s)


def _is_step(bound: Bound | None) -> bool:
    return bound is not None and bound.step is not None


def _is_turned(begin: float | None, end: float | None) -> bool:
    return begin is not None and end is not None and end < begin


def _begin_s(begin: Bound | None, clock: StepClock, newest_s: float) -> float | None:
    if begin is None:
        return None
    if begin.step is not None:
        return clock.end_of(begin.step - 1)
    return begin.at_s if begin.before_s is None else newest_s - begin.before_s


def _end_s(end: Bound | None, clock: StepClock) -> float | None:
    if end is None:
        return None
    if end.step is None:
        return end.at_s
    return None if clock.is_ahead(end.step) else clock.end_of(end.step)


class StepClock:
    """Converts steps to end times and back, by linear interpolation between known ends."""

    def __init__(self, series: SeriesSnapshot) -> None:
        at, last = series.column("at"), series.column("last")
        is_known = np.isfinite(at)
        # from one round to the next, times may go back a little, because hosts' clocks differ
        self._at: Float64 = np.maximum.accumulate(at[is_known]) if is_known.any() else np.zeros(0)
        self._last = last[is_known]
        if len(self._at):
            began = float(series.column("first")[is_known][0]) - 1.0
            took = float(series.column("sum_s")[is_known][0])
            begin_s = self._at[0] - (took if math.isfinite(took) else 0.0)
            self._at, self._last = np.r_[begin_s, self._at], np.r_[began, self._last]

    def end_of(self, step: int) -> float | None:
        """Return when a step ended; for a future step the end of the newest one; None before the first step."""
        if not len(self._at) or step < self._last[0]:
            return None
        return float(np.interp(step, self._last, self._at))

    def is_ahead(self, step: int) -> bool:
        """Return whether a step is the newest known one or a future one."""
        return not len(self._last) or step >= self._last[-1]

    def first_ended_from(self, at_s: float | None) -> int | None:
        """Return the first step that ended at `at_s` or later; None where no step is known."""
        if at_s is None or not len(self._at):
            return None
        if at_s > self._at[-1]:
            return int(self._last[-1]) + 1
        return max(int(self._last[0]) + 1, math.ceil(np.interp(at_s, self._at, self._last) - 1e-9))

    def last_ended_by(self, at_s: float | None) -> int | None:
        """Return the last step that had ended by `at_s`; None where no step is known."""
        if at_s is None or not len(self._at):
            return None
        return math.floor(np.interp(at_s, self._at, self._last) + 1e-9)
