"""Values of the ranks of a host by step, and their histories."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatrain_diagnostics.events.tables import Float64, Int64, StepTotals, Values

_NUM_POINTS = 60
"""Limit of the entries of a history."""


def cells_of(ranks: Int64, steps: Int64, rows: StepTotals | Values, found: Float64) -> Float64:
    """Return a value of each row as a matrix. Shapes: found [rows]; result [ranks, steps], NaN: no row."""
    cells = np.full((len(ranks), len(steps)), np.nan)
    is_inside = np.isin(rows.rank, ranks) & np.isin(rows.step, steps)
    place = np.searchsorted(ranks, rows.rank[is_inside]), np.searchsorted(steps, rows.step[is_inside])
    cells[place] = found[is_inside]
    return cells


def over_ranks(cells: Float64) -> Float64:
    """Return the least value of each step; NaN where no rank has one. Shape: [steps]."""
    least = np.where(np.isfinite(cells), cells, np.inf).min(axis=0)
    return np.where(np.isfinite(least), least, np.nan)


def mean_of(cells: Float64) -> float | None:
    known = cells[np.isfinite(cells)]
    return float(known.mean()) if len(known) else None


def history_of(of_steps: Float64, reduce: Callable[[Float64], float]) -> tuple[float | None, ...]:
    """Return the reduced values of each of at most _NUM_POINTS stretches of steps; None where there is none."""
    parts = np.array_split(of_steps, min(_NUM_POINTS, len(of_steps)))
    known = (part[np.isfinite(part)] for part in parts)
    return tuple(float(reduce(part)) if len(part) else None for part in known)
