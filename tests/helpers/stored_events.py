"""Tables of events for tests of the store: sums of steps whose values identify their row."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.tables import StepTotals
from megatrain_diagnostics.store.segment_store import SegmentStore
from tests.helpers.table_rows import table_rows

OPERATIONS = (3, 4, 10)
START_NS = 1_700_000_000 * 10**9


def step_totals(ranks: range, steps: range, *, round_number: int = 1, start_ns: int = START_NS) -> StepTotals:
    """Return a row for each rank, step and operation; `sum_ns` is unique."""
    rank, step, operation = (
        grid.ravel() for grid in np.meshgrid(list(ranks), list(steps), list(OPERATIONS), indexing="ij")
    )
    sequence = step * len(OPERATIONS) + np.searchsorted(OPERATIONS, operation)
    columns = {
        "round": round_number, "rank": rank, "sequence": sequence, "step": step, "operation": operation,
        "start_ns": start_ns + step * 10**9, "sum_ns": (round_number * 1000 + rank) * 10**6 + sequence,
        "max_ns": sequence, "count": 4,
    }  # fmt: skip
    return table_rows(StepTotals, columns)


def committed(store: SegmentStore, table: StepTotals) -> None:
    """Write a segment."""
    store.append(StepTotals, to_arrow(table))
    store.commit()


def segment_paths(directory: Path) -> list[Path]:
    """Return all files named like segments, in the order of their names."""
    return sorted(directory.rglob("*.parquet"), key=lambda path: path.name)
