"""The history of a run's metrics, from the records that rank 0 writes to <run>/metrics. Reading takes bounded time.

Every run has these records, with or without a diagnostics daemon, and keeps them longer than its events. For a step
that was repeated, the last record counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.sources.runs.metrics_records import (
    MetricsRecords,
    finite_number,
    is_last_report,
    read_metrics_records,
    reported_step,
)
from megatrain_diagnostics.analysis.effective_time import Restart
from megatrain_diagnostics.events.tables import Float64

_NO_ROUND = -1
_LINE_POINTS = 32
NEWEST_STEPS = 20
COLUMNS = ("step", "at", "loss", "step_s", "tokens", "num_ranks")


@dataclass(frozen=True, slots=True, eq=False)
class MetricsHistory:
    """The metrics of the steps of a run. Shapes: table [columns, steps], by step. NaN: not known, or not finite."""

    table: Float64
    mfu_per_rate: float = math.nan
    """MFU divided by tokens per second and rank. It is constant for a model and its hardware."""
    restarts: tuple[Restart, ...] = ()
    """The times lost where steps were repeated; empty where the history is sampled."""
    is_sampled: bool = False
    """Whether the file is so large that only pieces of it were read."""

    def __len__(self) -> int:
        return int(self.table.shape[1])

    def column(self, name: str) -> Float64:
        found: Float64 = self.table[COLUMNS.index(name)]
        return found

    @property
    def tokens_per_s(self) -> Float64:
        with np.errstate(over="ignore"):
            found: Float64 = self.column("tokens") / self.column("step_s")
        return found

    @property
    def mfu(self) -> Float64:
        found: Float64 = self.tokens_per_s / self.column("num_ranks") * self.mfu_per_rate
        return found

    @property
    def begin_s(self) -> float | None:
        """The time at which the first step that counts began, in unix seconds."""
        return None if not len(self) else float(self.column("at")[0] - np.nan_to_num(self.column("step_s")[0]))

    @property
    def end_s(self) -> float | None:
        return None if not len(self) else float(self.column("at")[-1])

    @property
    def last_step(self) -> int | None:
        return None if not len(self) else int(self.column("step")[-1])


EMPTY = MetricsHistory(np.zeros((len(COLUMNS), 0)))


def read_metrics_history(run: RunDirectory, most_bytes: int) -> MetricsHistory:
    """Return the history of a run; an empty one where nothing was reported yet.

    Raises: OSError where the file exists but cannot be read.
    """
    return _history_of(read_metrics_records(run, most_bytes))


@dataclass(frozen=True, slots=True)
class Outline:
    """A history in short, for a list of many runs: a few numbers, and lines for small charts."""

    loss_line: tuple[float | None, ...] = ()
    step_s_line: tuple[float | None, ...] = ()
    loss: float | None = None
    """The median of the newest steps; the next three are medians too."""
    step_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    num_ranks: int | None = None
    last_step: int | None = None
    begin_s: float | None = None
    end_s: float | None = None
    restarts: tuple[Restart, ...] = ()


def outline_of(history: MetricsHistory) -> Outline:
    """Return the outline of a history."""
    ranks = newest_median(history.column("num_ranks"), 1)
    return Outline(
        loss_line=line_of(history, "loss"),
        step_s_line=line_of(history, "step_s"),
        loss=newest_median(history.column("loss")),
        step_s=newest_median(history.column("step_s")),
        tokens_per_s=newest_median(history.tokens_per_s),
        mfu=newest_median(history.mfu),
        num_ranks=None if ranks is None else int(ranks),
        last_step=history.last_step,
        begin_s=history.begin_s,
        end_s=history.end_s,
        restarts=history.restarts,
    )


def newest_median(values: Float64, most: int = NEWEST_STEPS) -> float | None:
    """Return the median of the newest known values; None where there is none."""
    known = values[np.isfinite(values)][-most:]
    return float(np.median(known)) if len(known) else None


def binned(values: Float64, bins: Float64, num_bins: int) -> Float64:
    """Return the median of the values in each bin, NaN where there is none. Shapes: values and bins [steps]."""
    found = np.full(num_bins, np.nan)
    known = np.isfinite(values)
    places = bins[known].astype(np.int64)
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    for place, part in zip(places[starts], np.split(values[known], starts[1:]) if len(starts) else [], strict=True):
        found[place] = np.median(part)
    return found


def line_of(history: MetricsHistory, name: str) -> tuple[float | None, ...]:
    """Return a column as a few points that are evenly spread over the steps."""
    if len(history) < 2:
        return ()
    steps = history.column("step")
    bins = np.minimum((steps - steps[0]) / (steps[-1] - steps[0]) * _LINE_POINTS, _LINE_POINTS - 1)
    found = binned(history.column(name), bins, _LINE_POINTS)
    return tuple(float(f"{value:.4g}") if math.isfinite(value) else None for value in found.tolist())


def _history_of(read: MetricsRecords) -> MetricsHistory:
    rows: list[tuple[float, ...]] = []
    mfu_per_rate = math.nan
    for record in read.records:
        if (step := reported_step(record)) is not None:
            names = ("unix_time_s", "loss", "duration_s", "num_tokens", "world_size")
            rows.append((step, *(finite_number(record, name) for name in names)))
        elif record.get("kind") == "interval" and (rate := finite_number(record, "tokens_per_s_per_rank")) > 0:
            mfu_per_rate = finite_number(record, "mfu") / rate
    if not rows:
        return EMPTY
    table = np.array(rows, dtype=np.float64).T
    for name in ("step_s", "tokens", "num_ranks"):
        row = table[COLUMNS.index(name)]
        row[~(row > 0)] = np.nan
    restarts = () if read.is_sampled else _restarts(table)
    return MetricsHistory(table[:, is_last_report(table[0])], mfu_per_rate, restarts, read.is_sampled)


def _restarts(table: Float64) -> tuple[Restart, ...]:
    """Return for each repetition of steps the time from the last step that counts to the first one after it."""
    at, seconds, steps = table[1], table[3], table[0]
    found = []
    for place in np.flatnonzero(np.diff(steps) <= 0).tolist():
        kept = np.flatnonzero(steps[: place + 1] < steps[place + 1])
        begin_s = float(at[kept[-1]]) if len(kept) else float(at[0] - np.nan_to_num(seconds[0]))
        end_s = float(at[place + 1] - np.nan_to_num(seconds[place + 1]))
        if math.isfinite(begin_s) and begin_s <= end_s:
            found.append(Restart(_NO_ROUND, begin_s, end_s))
    return tuple(found)
