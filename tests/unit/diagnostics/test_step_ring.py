"""The ring of newest steps: any order, late rows, missing ranks, and ranks that send garbage."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain_diagnostics.analysis.step_ring import StepRing
from megatrain_diagnostics.events.tables import StepTotals, from_columns, num_rows, select
from tests.helpers.synthetic_steps import step_values

FORWARD = Operation.FORWARD_COMPUTE.number


def rows(cells: Iterable[tuple[int, int, int, int]]) -> StepTotals:
    """Return totals of (step, rank, operation, ns)."""
    step, rank, operation, sum_ns = (np.array(column) for column in zip(*cells, strict=True))
    count = len(step)
    return from_columns(
        StepTotals,
        {
            "round": np.ones(count),
            "rank": rank,
            "sequence": np.arange(count),
            "step": step,
            "operation": operation,
            "start_ns": np.zeros(count),
            "sum_ns": sum_ns,
            "max_ns": sum_ns,
            "count": np.ones(count),
            "num_bytes": np.ones(count),
        },
    )


def cells(steps: range, ranks: range) -> list[tuple[int, int, int, int]]:
    """Return two operations of each; no two cells have the same ns."""
    return [
        (step, rank, operation, (step * 1000 + rank * 10 + operation) * 10**6)
        for step in steps
        for rank in ranks
        for operation in (FORWARD, Operation.OPTIMIZER.number)
    ]


def test_rows_in_any_order_and_twice_come_to_the_same() -> None:
    everything = cells(range(20, 30), range(4))
    shuffled = rows(everything)
    ring = StepRing(4)
    order = np.random.default_rng(3).permutation(num_rows(shuffled))
    for part in np.array_split(order, 7):
        ring.add_totals(select(shuffled, part), 0.0)
    ring.add_totals(select(shuffled, order[:20]), 0.0)
    taken = []
    while (step := ring.due(0.0, 10.0)) is not None:
        row = ring.take(step)
        taken.append(row.step)
        assert row.has_reported.all()
        for number in (FORWARD, Operation.OPTIMIZER.number):
            expected = [(step * 1000 + rank * 10 + number) / 1000 for rank in range(4)]
            np.testing.assert_allclose(row.of(number), expected, rtol=1e-6)
        assert row.of(Operation.GC.number).tolist() == [0.0] * 4
    assert taken == list(range(20, 29))  # rows of the newest step may still be on their way
    assert ring.due(11.0, 10.0) == 29


def test_step_waits_a_limited_time_for_the_last_rank() -> None:
    ring = StepRing(3)
    ring.add_totals(rows(cells(range(5, 8), range(2))), 100.0)
    assert ring.due(109.0, 10.0) is None
    assert ring.due(110.0, 10.0) == 5
    row = ring.take(5)
    assert row.has_reported.tolist() == [True, True, False]
    assert row.of(FORWARD)[2] == 0.0
    ring.add_totals(rows(cells(range(5, 7), range(2, 3))), 110.0)
    assert ring.counters.num_late == 2
    assert ring.due(110.0, 10.0) == 6


def test_impossible_rows_are_counted_and_change_nothing() -> None:
    ring = StepRing(4, num_steps=16)
    ring.add_totals(rows(cells(range(100, 104), range(4))), 0.0)
    ring.add_totals(rows([(2**31 - 1, 3, FORWARD, 10), (99_999, 2, FORWARD, 10)]), 0.0)
    assert ring.counters.num_ahead == 2
    ring.add_totals(rows([(101, -1, FORWARD, 1), (101, 4, FORWARD, 1), (101, 0, 64, 1), (101, 0, FORWARD, -1)]), 0.0)
    ring.add_totals(rows([(101, 0, FORWARD, 2**62), (-1, 0, FORWARD, 1)]), 0.0)
    assert ring.counters.num_wrong == 6
    assert ring.due(0.0, 10.0) == 100
    np.testing.assert_allclose(ring.take(100).of(FORWARD), [100 + (rank * 10 + 3) / 1000 for rank in range(4)])


def test_impossible_first_row_does_not_hold_up_the_others() -> None:
    ring = StepRing(4, num_steps=16)
    ring.add_totals(rows([(10**9, 3, FORWARD, 10)]), 0.0)
    ring.add_totals(rows(cells(range(100, 104), range(3))), 0.0)
    ring.add_totals(rows(cells(range(104, 106), range(3))), 0.0)
    assert ring.due(0.0, 10.0) is not None
    assert ring.next_step is not None
    assert 100 <= ring.next_step <= 105


def test_the_ring_follows_when_most_ranks_have_gone_on() -> None:
    ring = StepRing(4, num_steps=16)
    ring.add_totals(rows(cells(range(2), range(4))), 0.0)
    ring.add_totals(rows(cells(range(500, 504), range(2))), 0.0)
    assert ring.next_step == 0
    ring.add_totals(rows(cells(range(500, 504), range(2, 3))), 0.0)
    assert ring.next_step == 503 - 8
    assert ring.newest.tolist() == [503, 503, 503, 1]


def test_more_operations_than_expected_fit() -> None:
    ring = StepRing(2)
    ring.add_totals(rows([(0, rank, operation, operation) for rank in range(2) for operation in range(1, 26)]), 0.0)
    ring.add_totals(rows(cells(range(1, 2), range(2))), 0.0)
    row = ring.take(0)
    assert len(row.operations) == 25
    assert row.of(20).tolist() == pytest.approx([20e-9] * 2)


def test_work_of_ranks_comes_from_values() -> None:
    ring = StepRing(2)
    ring.add_totals(rows(cells(range(2), range(2))), 0.0)
    ring.add_values(step_values(1, 0, {StepValue.LOSS: 3.0}, [10.0, float("nan")]))
    ring.add_values(step_values(1, 900, {}, [10.0, 20.0]))
    assert ring.take(0).work[0].tolist() == [10.0, 0.0]
