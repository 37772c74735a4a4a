"""What the controller keeps: the ring of newest steps, and the spans that give the gain of a verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain_diagnostics.analysis.step_ring import StepRing
from megatrain_diagnostics.analysis.whatif import gain_without, make_model
from megatrain_diagnostics.controller import span_window
from megatrain_diagnostics.controller.span_window import SpanWindow
from megatrain_diagnostics.events.roster import make_roster
from megatrain_diagnostics.events.tables import Clocks, StepTotals, num_rows, select
from tests.helpers.pipeline_job import PipelineJob
from tests.helpers.recorded_spans import ROUND, recorded_spans, who_ran
from tests.helpers.synthetic_steps import empty_groups, step_values
from tests.helpers.table_rows import table_rows

FORWARD = Operation.FORWARD_COMPUTE.number


def rows(cells: Iterable[tuple[int, int, int, int]]) -> StepTotals:
    """Return totals of (step, rank, operation, ns)."""
    step, rank, operation, sum_ns = zip(*cells, strict=True)
    columns = {"step": step, "rank": rank, "operation": operation, "sum_ns": sum_ns, "max_ns": sum_ns, "count": 1}
    return table_rows(StepTotals, columns)


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
        for operation in (Operation.FORWARD_COMPUTE, Operation.OPTIMIZER):
            expected = [(step * 1000 + rank * 10 + operation.number) / 1000 for rank in range(4)]
            np.testing.assert_allclose(row.of(operation), expected, rtol=1e-6)
        assert row.of(Operation.GC).tolist() == [0.0] * 4
    assert taken == list(range(20, 29))  # rows of the newest step may still be on their way
    assert ring.due(11.0, 10.0) == 29


def test_step_waits_a_limited_time_for_the_last_rank() -> None:
    ring = StepRing(3)
    ring.add_totals(rows(cells(range(5, 8), range(2))), 100.0)
    assert ring.due(109.0, 10.0) is None
    assert ring.due(110.0, 10.0) == 5
    row = ring.take(5)
    assert row.has_reported.tolist() == [True, True, False]
    assert row.of(Operation.FORWARD_COMPUTE)[2] == 0.0
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
    expected = [100 + (rank * 10 + 3) / 1000 for rank in range(4)]
    np.testing.assert_allclose(ring.take(100).of(Operation.FORWARD_COMPUTE), expected)


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
    assert row.of(Operation.CHECKPOINT).tolist() == pytest.approx([20e-9] * 2)


def test_work_of_ranks_comes_from_values() -> None:
    ring = StepRing(2)
    ring.add_totals(rows(cells(range(2), range(2))), 0.0)
    ring.add_values(step_values(1, 0, {StepValue.LOSS: 3.0}, [10.0, float("nan")]))
    ring.add_values(step_values(1, 900, {}, [10.0, 20.0]))
    assert ring.take(0).work[0].tolist() == [10.0, 0.0]


JOB = PipelineJob(pp_size=1, dp_size=6, slow_dp_ranks={4: 1.4}, is_overlapped=True, separate_s=0.0, noise=0.02)
TABLE = JOB.run()
SPANS = recorded_spans(TABLE, JOB.shape)
ROSTER = make_roster(who_ran(JOB.shape), empty_groups(), ROUND)


def window(*parts: np.ndarray) -> SpanWindow:
    found = SpanWindow()
    for part in parts:
        found.add(select(SPANS, part))
    return found


def test_gain_does_not_depend_on_the_batches_of_spans() -> None:
    expected = gain_without(make_model(TABLE, JOB.shape), [4])
    assert expected > 0.0
    shuffled = np.random.default_rng(1).permutation(num_rows(SPANS))
    for parts in ([shuffled], np.array_split(shuffled, 9), [shuffled, shuffled[:50]]):
        assert window(*parts).gain_without([4], 0, ROSTER) == pytest.approx(expected, rel=0.02)
    assert window(shuffled).gain_without([1], 0, ROSTER) == pytest.approx(0.0, abs=0.05 * expected)


def test_only_steps_since_the_beginning_count() -> None:
    everything = np.arange(num_rows(SPANS))
    assert window(everything).gain_without([4], int(SPANS.step.max()) + 1, ROSTER) is None
    assert window().gain_without([4], 0, ROSTER) is None


def test_clocks_that_differ_by_an_hour_change_nothing() -> None:
    hour = 3_600_000_000_000
    hosts = [f"host-{rank // 2}" for rank in range(6)]
    roster = replace(ROSTER, hosts=dict(enumerate(hosts)))
    ahead = np.isin(SPANS.rank, [2, 3])
    moved = replace(SPANS, start_ns=SPANS.start_ns + ahead * hour, launch_ns=SPANS.launch_ns + ahead * hour)
    found = SpanWindow()
    found.add(moved)
    times = [int(SPANS.start_ns.min()), int(SPANS.start_ns.max())]
    for host in sorted(set(hosts)):
        offset = hour if host == "host-1" else 0
        columns = {"at_ns": [at + offset for at in times], "offset_ns": offset, "error_ns": 1000, "host": host}
        found.add_clocks(table_rows(Clocks, columns))
    expected = gain_without(make_model(TABLE, JOB.shape), [4])
    assert found.gain_without([4], 0, roster) == pytest.approx(expected, rel=0.02)


def test_rows_are_bounded_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    last_step = int(SPANS.step.max())
    older, newest = (np.flatnonzero(chosen) for chosen in (SPANS.step < last_step, SPANS.step == last_step))
    monkeypatch.setattr(span_window, "_MAX_ROWS", len(newest))
    only_newest = window(newest).gain_without([4], 0, ROSTER)
    assert only_newest is not None
    assert window(older, newest).gain_without([4], 0, ROSTER) == only_newest
