"""Time by rank and step, from the store; the oracle is a loop over all rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.tables import StepTotals, joined, num_rows, select
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_diagnostics.store.step_cells import Aggregate, step_cells
from tests.helpers.stored_events import step_totals


def shuffled_values() -> StepTotals:
    """Return rows of 13 ranks and 11 steps, some missing, with values in no order, all different."""
    table = joined(StepTotals, [step_totals(range(13), range(11)), step_totals(range(13), range(11), round_number=2)])
    rng = np.random.default_rng(3)
    table.sum_ns[:] = rng.permutation(num_rows(table)) * 10
    table.max_ns[:] = rng.permutation(num_rows(table))
    return select(table, rng.random(num_rows(table)) < 0.8)


ROWS = shuffled_values()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> StoredEvents:
    directory = tmp_path_factory.mktemp("cells")
    with SegmentStore(directory) as store:
        for part in (ROWS, select(ROWS, np.arange(20))):  # some come twice
            store.append(StepTotals, to_arrow(part))
            store.commit()
    return StoredEvents(directory)


@given(
    round_number=st.integers(1, 3),
    operation=st.sampled_from([3, 4, 10]),
    aggregate=st.sampled_from(["sum_ns", "max_ns"]),
    steps=st.builds(range, st.integers(0, 3), st.integers(4, 14)),
    num_ranks=st.integers(1, 20),
)
@settings(max_examples=40)
def test_cells_are_those_that_a_loop_finds(
    stored: StoredEvents, round_number: int, operation: int, aggregate: Aggregate, steps: range, num_ranks: int
) -> None:
    expected = np.full((len(steps), num_ranks), np.nan)
    for row in range(num_rows(ROWS)):
        rank, step = int(ROWS.rank[row]), int(ROWS.step[row])
        is_wanted = ROWS.round[row] == round_number and ROWS.operation[row] == operation
        if is_wanted and rank < num_ranks and step in steps:
            expected[step - steps.start, rank] = getattr(ROWS, aggregate)[row]

    found = step_cells(stored, round_number, operation, aggregate, steps, num_ranks)

    np.testing.assert_array_equal(found, expected)


def test_greater_row_of_a_cell_counts(tmp_path: Path) -> None:
    table = step_totals(range(2), range(2))
    table.sum_ns[:] = 100
    with SegmentStore(tmp_path) as store:
        for value in (100, 112, 90):
            table.sequence[:] += 1000
            table.sum_ns[(table.rank == 1) & (table.step == 1)] = value
            store.append(StepTotals, to_arrow(table))
            store.commit()

    found = step_cells(StoredEvents(tmp_path), 1, 3, "sum_ns", range(2), 2)

    assert found.tolist() == [[100.0, 100.0], [100.0, 112.0]]


def test_directory_without_totals_gives_cells_without_values(tmp_path: Path) -> None:
    assert np.isnan(step_cells(StoredEvents(tmp_path), 1, 3, "sum_ns", range(2), 4)).tolist() == [[True] * 4] * 2
