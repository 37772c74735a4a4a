"""Analyzes how the pace of a job changes over time: sudden changes of level, slow trends, and which operations changed.

Events are read in stages, because the events of a long job do not all fit in memory: the pace from the sums of a few
ranks, the causes of each change from the sums of all ranks around it, and launch stagger, issue latency and void from a
few sampled steps. Sources: Greyhound (change points), MegaScale sec. 5.1 (stagger), XPUTimer (issue latency, void).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import DataError
from megatrain_diagnostics.analysis.change_points import ChangePoint, change_points
from megatrain_diagnostics.analysis.drift_causes import Moved, moved_operations
from megatrain_diagnostics.analysis.launch_stagger import (
    IssueLatency,
    LaunchSample,
    Stagger,
    latencies_of,
    sample_step,
    stagger_of,
)
from megatrain_diagnostics.analysis.step_series import SERIES_OPERATIONS, StepSeries, step_series
from megatrain_diagnostics.analysis.step_windows import full_steps, plausible_spans, read_step_events
from megatrain_diagnostics.analysis.trends import Hours, Trend, hours_of_day, trend
from megatrain_diagnostics.events.roster import Roster, read_roster
from megatrain_diagnostics.events.source import EventSource, Where
from megatrain_diagnostics.events.tables import Spans, StepTotals, Values, select

_NUM_PACE_RANKS = 16
_NUM_SAMPLED_STEPS = 40
_AROUND = 50
"""Number of steps before and after a change that are compared."""
_SAME_PLACE = 5


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A lasting change of pace. Units: s, unix s."""

    step: int
    seen_at_step: int
    at_unix_s: float
    posterior: float
    before_s: float
    after_s: float
    work_shift: float
    """Relative change of the work of a step: a step with more work takes longer without a fault."""
    moved: tuple[Moved, ...]
    """Operations whose time changed too, the likeliest cause first."""

    @property
    def shift(self) -> float:
        return self.after_s / self.before_s - 1.0

    @property
    def is_of_work(self) -> bool:
        """Whether the change of work accounts for at least half of the change of time."""
        return abs(self.work_shift) >= 0.5 * abs(self.shift) and self.work_shift * self.shift > 0


@dataclass(frozen=True, slots=True)
class Drift:
    """The change of the step time. Units: s; shares are fractions."""

    round: int
    first_step: int
    last_step: int
    num_steps: int
    num_left_out: int
    step_s: float
    """Median step time."""
    step_trend: Trend | None
    changes: tuple[LevelChange, ...]
    rate: float
    """Median of the work per second, in the unit `rate_name`; 0: not known."""
    rate_name: str
    """"FLOP/s of a rank" or "tokens/s"."""
    peak_flops: float
    """Peak of a device in FLOP/s as reported by the trainer; 0: not known."""
    rate_trend: Trend | None
    rate_changes: tuple[LevelChange, ...]
    """Changes of the rate of work that are no changes of the step time. Their times, in s, are those of a step with the
    median work."""
    gc_share: float
    gc_trend: Trend | None
    stagger: Stagger | None
    void: float
    """Fraction of a step in which no timed operation ran, mean over the sampled steps; -1: not known."""
    void_trend: Trend | None
    latencies: tuple[IssueLatency, ...]
    hours: Hours | None
    num_sampled: int
    notes: tuple[str, ...]


def analyze_drift(
    source: EventSource, round_number: int, first_step: int | None = None, last_step: int | None = None
) -> Drift:
    """Return how the pace of a round changed over its steps, or from `first_step` to `last_step`, inclusive.

    Raises: DataError if no step has a known duration, and as `read_roster`.
    """
    whole = Where(rounds=(round_number,), first_step=first_step, last_step=last_step)
    roster = read_roster(source, round_number)
    ranks = _spread_out(tuple(sorted(roster.hosts)), _NUM_PACE_RANKS)
    some = replace(whole, ranks=ranks)
    series = step_series(
        source.read(StepTotals, replace(some, operations=SERIES_OPERATIONS)), source.read(Values, some)
    )
    if not len(series):
        raise DataError(
            f"round {round_number} has no step of known duration"
            + (
                f", except {series.num_left_out} at the beginning or after checkpoints and evaluations"
                if series.num_left_out
                else ""
            )
        )
    rate = np.where(series.work > 0, series.work / series.seconds, 0.0)
    has_rate = bool(series.work_name)
    median_work = float(np.median(series.work)) if has_rate else 0.0
    samples, notes = _samples(source, roster, some)
    known_void = [sample for sample in samples if sample.void >= 0]
    changes = _changes(source, series, roster)
    return Drift(
        round=round_number,
        first_step=int(series.step[0]),
        last_step=int(series.step[-1]),
        num_steps=len(series),
        num_left_out=series.num_left_out,
        step_s=float(np.median(series.seconds)),
        step_trend=trend(series.step.astype(float), series.seconds),
        changes=changes,
        rate=float(np.median(rate)),
        rate_name={"FLOP": "FLOP/s of a rank", "tokens": "tokens/s"}.get(series.work_name, ""),
        peak_flops=series.peak_flops,
        rate_trend=trend(series.step.astype(float), rate) if has_rate else None,
        rate_changes=_rate_changes(source, series, median_work, changes, roster) if has_rate else (),
        gc_share=float(series.gc_seconds.sum() / series.seconds.sum()),
        gc_trend=trend(series.step[series.gc_seconds > 0].astype(float), series.gc_seconds[series.gc_seconds > 0]),
        stagger=stagger_of(samples, roster),
        void=float(np.mean([sample.void for sample in known_void])) if known_void else -1.0,
        void_trend=trend(
            np.array([float(sample.step) for sample in known_void]), np.array([sample.void for sample in known_void])
        ),
        latencies=latencies_of(samples),
        hours=hours_of_day(series.at_ns, series.seconds),
        num_sampled=len(samples),
        notes=notes,
    )


def _spread_out(numbers: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return at most `most` of the numbers, evenly spread, with the first and the last."""
    if len(numbers) <= most:
        return numbers
    return tuple(numbers[place] for place in np.linspace(0, len(numbers) - 1, most).astype(int).tolist())


def _changes(source: EventSource, series: StepSeries, roster: Roster) -> tuple[LevelChange, ...]:
    """Return the changes of level, each with the operations whose time changed between the two levels."""
    found = change_points(series.seconds)
    bounds = [0, *(point.place for point in found), len(series)]
    return tuple(
        _change(source, series, point, (bounds[number], bounds[number + 2]), roster)
        for number, point in enumerate(found)
    )


def _change(
    source: EventSource, series: StepSeries, point: ChangePoint, bounds: tuple[int, int], roster: Roster
) -> LevelChange:
    place = point.place
    before = slice(max(bounds[0], place - _AROUND), place)
    after = slice(place, min(bounds[1], place + _AROUND))
    old, new = (_totals(source, series, part, roster) for part in (before, after))
    work = series.work
    work_shift = float(np.median(work[after]) / np.median(work[before]) - 1.0) if series.work_name else 0.0
    return LevelChange(
        step=int(series.step[place]),
        seen_at_step=int(series.step[point.seen_at]),
        at_unix_s=float(series.at_ns[place] / 1e9),
        posterior=point.posterior,
        before_s=point.before,
        after_s=point.after,
        work_shift=work_shift,
        moved=moved_operations(
            old, new, roster, float(np.median(series.seconds[after]) - np.median(series.seconds[before]))
        ),
    )


def _totals(source: EventSource, series: StepSeries, part: slice, roster: Roster) -> StepTotals:
    """Read the sums of all ranks for the steps of one side of a change."""
    steps = series.step[part]
    where = Where(rounds=(roster.round,), first_step=int(steps[0]), last_step=int(steps[-1]))
    found = source.read(StepTotals, where)
    is_fit = np.isin(found.step, steps) & (found.rank >= 0) & (found.rank < roster.layout.world_size)
    return select(found, is_fit & (found.sum_ns >= 0))


def _rate_changes(
    source: EventSource,
    series: StepSeries,
    median_work: float,
    changes: tuple[LevelChange, ...],
    roster: Roster,
) -> tuple[LevelChange, ...]:
    """Return changes of the time for the median work, except those that are also changes of the step time."""
    same_work_s = series.seconds / series.work * median_work
    known = [np.searchsorted(series.step, change.step) for change in changes if not change.is_of_work]
    found = _changes(source, replace(series, seconds=same_work_s), roster)
    return tuple(
        point
        for point in found
        if all(abs(np.searchsorted(series.step, point.step) - place) > _SAME_PLACE for place in known)
    )


def _samples(source: EventSource, roster: Roster, some: Where) -> tuple[list[LaunchSample], tuple[str, ...]]:
    """Measure a few fully recorded steps, from the reduce-scatters of all ranks and all spans of some ranks."""
    steps = full_steps(source.read(Spans, replace(some, operations=(Operation.STEP.number,))))
    notes: list[str] = []
    if not len(steps):
        notes.append("no step was recorded span by span: launch stagger, issue latency and void time are not known")
    found = []
    for step in _spread_out(tuple(steps.tolist()), _NUM_SAMPLED_STEPS):
        everything = read_step_events(source, roster.round, step, step, some.ranks)
        scatters = source.read(
            Spans,
            Where(
                rounds=(roster.round,),
                first_step=step,
                last_step=step,
                operations=(Operation.GRADS_REDUCE_SCATTER.number,),
            ),
        )
        found.append(sample_step(plausible_spans(source, roster, scatters)[0], everything, step))
        notes += [note for note in everything.notes if note not in notes]
    return found, tuple(notes)
