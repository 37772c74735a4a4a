"""The training loss of each source of the data over the steps of a run, from the records in metrics.jsonl.

Only a run with several sources records it. Pure functions: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatrain_dashboard.sources.runs.metrics_records import Record, finite_number, is_last_report, reported_step
from megatrain_diagnostics.events.tables import Float64, Int64

_MAX_SOURCES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class SourceLosses:
    """Losses by source and step. Steps count from zero, as in the series of the charts."""

    names: tuple[str, ...]
    """The sources, in the order in which the run reported them first."""
    steps: Int64
    """The reported steps, ascending. Shape: [steps]."""
    at_s: Float64
    """The unix times at which the steps ended, NaN where unknown. Shape: [steps]."""
    losses: Float64
    """Nats per token; not finite where a source's loss was not. Shape: [sources, steps]."""
    tokens: Float64
    """Tokens with a label; 0: the source had none in the step. Shape: [sources, steps]."""

    def means(self, bins: Int64) -> Float64:
        """Return the mean loss of each source in each bin, weighted by tokens; NaN where nothing finite is known.

        `bins`: the bin of each step, ascending from 0 without a gap. Shape of the result: [sources, bins].
        """
        if not len(self.steps):
            return np.zeros((len(self.names), 0))
        starts = np.flatnonzero(np.diff(bins, prepend=-1))
        tokens = np.where(np.isfinite(self.losses), self.tokens, 0.0)
        sums = np.add.reduceat(np.where(tokens > 0, self.losses, 0.0) * tokens, starts, axis=1)
        counts = np.add.reduceat(tokens, starts, axis=1)
        return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)

    def highest(self, bins: Int64) -> Float64:
        """Return the highest finite loss of each source in each bin; NaN where there is none. Shapes: as `means`."""
        if not len(self.steps):
            return np.zeros((len(self.names), 0))
        known = np.where((self.tokens > 0) & np.isfinite(self.losses), self.losses, np.nan)
        highest: Float64 = np.fmax.reduceat(known, np.flatnonzero(np.diff(bins, prepend=-1)), axis=1)
        return highest


def source_losses(records: Iterable[Record], first: int | None = None, last: int | None = None) -> SourceLosses:
    """Return the losses of the steps from `first` to `last`, both included; None: no bound.

    For a step that was repeated, the last record counts.
    """
    reports = [(step - 1, record) for record in records if (step := reported_step(record)) is not None]
    is_last = is_last_report(np.array([step for step, _ in reports], dtype=np.int64))
    kept = [
        (step, record)
        for (step, record), counts in zip(reports, is_last.tolist(), strict=True)
        if counts and (first is None or step >= first) and (last is None or step <= last) and _parts(record)
    ]
    rows: dict[str, int] = {}
    for _, record in kept:
        for part in _parts(record):
            if len(rows) < _MAX_SOURCES:
                rows.setdefault(str(part["name"]), len(rows))
    losses, tokens = np.full((len(rows), len(kept)), np.nan), np.zeros((len(rows), len(kept)))
    for place, (_, record) in enumerate(kept):
        for part in _parts(record):
            row = rows.get(str(part["name"]))
            count = finite_number(part, "num_tokens")
            if row is not None and count > 0:
                losses[row, place], tokens[row, place] = finite_number(part, "loss"), count
    return SourceLosses(
        names=tuple(rows),
        steps=np.array([step for step, _ in kept], dtype=np.int64),
        at_s=np.array([finite_number(record, "unix_time_s") for _, record in kept], dtype=np.float64),
        losses=losses,
        tokens=tokens,
    )


def _parts(record: Record) -> list[Record]:
    """Return the reports of the sources in a record; those that no trainer wrote are left out."""
    parts = record.get("sources")
    return [one for one in parts if isinstance(one, dict) and one.get("name")] if isinstance(parts, list) else []
