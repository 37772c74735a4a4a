"""The heat map: the greatest value in each cell and whose it is; the oracle is a loop over all rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.tables import StepTotals, joined, num_rows, select
from megatrain_diagnostics.store.heat import NOTHING, HeatQuestion
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.segment_store import SegmentStore
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
    directory = tmp_path_factory.mktemp("heat")
    with SegmentStore(directory) as store:
        for part in (ROWS, select(ROWS, np.arange(20))):  # some come twice
            store.append(StepTotals, to_arrow(part))
            store.commit()
    return StoredEvents(directory)


def cells(question: HeatQuestion) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Return (value, rank, step) of each cell that has rows."""
    found: dict[tuple[int, int], tuple[int, int, int]] = {}
    for row in range(num_rows(ROWS)):
        rank, step = int(ROWS.rank[row]), int(ROWS.step[row])
        is_wanted = ROWS.round[row] == question.round and ROWS.operation[row] == question.operation
        if is_wanted and rank in question.ranks and step in question.steps:
            cell = (
                (rank - question.ranks.start) // question.ranks_per_bin,
                (step - question.steps.start) // question.steps_per_bin,
            )
            value = int(getattr(ROWS, question.aggregate)[row])
            found[cell] = max(found.get(cell, (NOTHING, 0, 0)), (value, rank, step))
    return found


@given(
    question=st.builds(
        HeatQuestion,
        round=st.integers(1, 3),
        operation=st.sampled_from([3, 4, 10]),
        ranks=st.builds(range, st.integers(0, 5), st.integers(6, 20)),
        steps=st.builds(range, st.integers(0, 3), st.integers(4, 14)),
        aggregate=st.sampled_from(["sum_ns", "max_ns"]),
        max_rank_bins=st.integers(1, 20),
        max_step_bins=st.integers(1, 20),
    )
)
@settings(max_examples=40)
def test_cells_are_those_that_a_loop_finds(stored: StoredEvents, question: HeatQuestion) -> None:
    heat = stored.heat(question)

    expected = cells(question)
    rows, columns = heat.values.shape
    assert rows <= question.max_rank_bins
    assert columns <= question.max_step_bins
    for row in range(rows):
        for column in range(columns):
            found = tuple(int(array[row, column]) for array in (heat.values, heat.at_rank, heat.at_step))
            assert found == expected.get((row, column), (NOTHING,) * 3)


def test_one_slow_rank_is_not_averaged_away(tmp_path: Path) -> None:
    table = step_totals(range(960), range(4))
    table.sum_ns[:] = 100
    table.sum_ns[(table.rank == 777) & (table.step == 2) & (table.operation == 3)] = 112
    with SegmentStore(tmp_path) as store:
        store.append(StepTotals, to_arrow(table))
        store.commit()

    heat = StoredEvents(tmp_path).heat(HeatQuestion(1, 3, range(960), range(4), max_rank_bins=20))

    assert heat.values.shape == (20, 4)
    assert np.argwhere(heat.values == 112).tolist() == [[777 // 48, 2]]
    assert heat.at_rank[777 // 48, 2] == 777
    assert heat.at_step[777 // 48, 2] == 2


def test_directory_without_totals_gives_cells_without_values(tmp_path: Path) -> None:
    heat = StoredEvents(tmp_path).heat(HeatQuestion(1, 3, range(4), range(2)))

    assert heat.values.tolist() == [[NOTHING] * 2] * 4


@pytest.mark.parametrize(
    ("ranks", "steps", "bins"), [(range(0), range(1), 1), (range(0, 4, 2), range(1), 1), (range(1), range(1), 0)]
)
def test_question_that_makes_no_sense_is_refused(ranks: range, steps: range, bins: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        HeatQuestion(1, 3, ranks, steps, max_rank_bins=bins)
