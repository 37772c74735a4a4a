"""Conversion of times to the daemon's clock: drift, jumps of an hour, and hosts whose clock was never compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_diagnostics.events.clocks import align, host_clocks
from megatrain_diagnostics.events.tables import Clocks, Spans, Stacks, joined, num_rows
from megatrain_diagnostics.wire.clock_exchange import ClockReading, read_clock
from megatrain_diagnostics.wire.messages import ClockAnswer
from tests.helpers.event_collector import span_rows
from tests.helpers.table_rows import table_rows

SECOND = 10**9
HOUR = 3600 * SECOND
BEGIN = 1_800_000_000 * SECOND


def compared(offsets: list[tuple[int, int]], host: str = "host-1") -> Clocks:
    """Return comparisons of (time by the daemon's clock, offset of the host's)."""
    at_ns = [time + offset for time, offset in offsets]
    columns = {"at_ns": at_ns, "offset_ns": [offset for _, offset in offsets], "error_ns": 50_000, "host": host}
    return table_rows(Clocks, columns)


def spans_at(times: Any, **columns: Any) -> Spans:
    times = np.asarray(times, dtype=np.int64)
    return span_rows(len(times), start_ns=times, launch_ns=times - 1000, **columns)


def test_steady_offset_is_subtracted_from_times_only() -> None:
    clocks = compared([(BEGIN, 5 * SECOND), (BEGIN + 30 * SECOND, 5 * SECOND)])
    true = BEGIN + np.arange(-100, 100) * SECOND
    moved = align(spans_at(true + 5 * SECOND, duration_ns=7), clocks, {0: "host-1"})
    assert moved.start_ns.tolist() == true.tolist()
    assert moved.launch_ns.tolist() == (true - 1000).tolist()
    assert set(moved.duration_ns.tolist()) == {7}


def test_drift_between_two_comparisons_is_interpolated() -> None:
    clocks = compared([(BEGIN, 0), (BEGIN + 100 * SECOND, SECOND // 100)])  # 100 ppm
    true = BEGIN + np.arange(0, 101) * SECOND
    moved = align(spans_at(true + np.arange(0, 101) * 100_000), clocks, {0: "host-1"})
    assert np.abs(moved.start_ns - true).max() < 1000


@pytest.mark.parametrize("jump", [HOUR, -HOUR, 2 * SECOND, -2 * SECOND])
def test_rows_are_moved_by_the_offset_of_their_time(jump: int) -> None:
    """Two hours before and after the jump, with a comparison every 30 s; the jump is between two of them."""
    times = BEGIN + np.arange(-7200, 7200, 30) * SECOND
    clocks = compared([(int(time), 40 if time < BEGIN + 10 * SECOND else 40 + jump) for time in times])
    true = BEGIN + np.arange(-7200, 7200, 7) * SECOND
    host_times = true + np.where(true < BEGIN + 10 * SECOND, 40, 40 + jump)
    shuffled = np.random.default_rng(1).permutation(len(true))
    table = spans_at(host_times[shuffled], sequence=shuffled)
    moved = align(table, clocks, {0: "host-1"})
    wrong = np.abs(moved.start_ns - true[shuffled]) > 1000
    if abs(jump) > 30 * SECOND:
        assert not wrong.any()
        # the last rows fit both offsets, and no certain row follows them
        until = true < BEGIN + 1800 * SECOND
        moved_until = align(spans_at(host_times[until], sequence=np.flatnonzero(until)), clocks, {0: "host-1"})
        assert np.abs(moved_until.start_ns - true[until]).max() < 1000
    # a step smaller than the time between two comparisons: its exact time is unknown, so a row that the
    # other offset would move there may belong to it
    near = min(abs(jump), 30 * SECOND)
    unknown = (true[shuffled] >= BEGIN - near) & (true[shuffled] <= BEGIN + 30 * SECOND + near)
    assert not wrong[~unknown].any()
    assert np.abs(moved.start_ns - true[shuffled]).max() <= abs(jump)


def test_each_rank_of_a_host_is_followed_by_itself() -> None:
    clocks = compared([(BEGIN, 0), (BEGIN + 60 * SECOND, -HOUR), (BEGIN + 90 * SECOND, -HOUR)])
    before, after = BEGIN + 10 * SECOND, BEGIN + 70 * SECOND
    table = spans_at(
        [before, after - HOUR, before + 1, after + 1 - HOUR],
        rank=np.array([0, 0, 1, 1]),
        sequence=np.array([5, 6, 1000, 1001]),
    )
    moved = align(table, clocks, {0: "host-1", 1: "host-1"})
    assert moved.start_ns.tolist() == [before, after, before + 1, after + 1]


def test_offsets_are_by_host_and_default_to_zero() -> None:
    clocks = joined(Clocks, [compared([(BEGIN, 100)]), compared([(BEGIN, -700)], "host-2")])
    table = spans_at([BEGIN] * 4, rank=np.array([0, 1, 2, 3]))
    moved = align(table, clocks, {0: "host-1", 1: "host-2", 2: "host-3"})
    assert moved.start_ns.tolist() == [BEGIN - 100, BEGIN + 700, BEGIN, BEGIN]
    assert sorted(host_clocks(clocks)) == ["host-1", "host-2"]


def test_tables_with_a_host_column_need_no_roster() -> None:
    stacks = table_rows(Stacks, {"rank": [0, 1], "at_ns": BEGIN, "host": ["host-1", "host-9"]})
    moved = align(stacks, compared([(BEGIN, 100)]), {})
    assert moved.at_ns.tolist() == [BEGIN - 100, BEGIN]


def test_alignment_without_rows_or_comparisons_changes_nothing() -> None:
    table = spans_at([BEGIN])
    assert align(table, compared([]), {0: "host-1"}) is table
    assert num_rows(align(spans_at([]), compared([(BEGIN, 5)]), {})) == 0


@settings(max_examples=50)
@given(
    st.lists(st.integers(-2 * HOUR, 2 * HOUR), min_size=1, max_size=6),
    st.lists(st.integers(-4 * HOUR, 40 * HOUR), min_size=1, max_size=30),
)
def test_every_row_is_moved_by_a_measured_offset(offsets: list[int], times: list[int]) -> None:
    clocks = compared([(BEGIN + number * HOUR, offset) for number, offset in enumerate(offsets)])
    table = spans_at([BEGIN + time for time in times])
    moved = align(table, clocks, {0: "host-1"})
    taken = table.start_ns - moved.start_ns
    assert taken.min() >= min(offsets)
    assert taken.max() <= max(offsets)


@settings(max_examples=50)
@given(
    st.integers(-HOUR, HOUR), st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=9)
)
def test_the_true_offset_is_within_the_error_of_a_reading(offset: int, ways: list[tuple[int, int]]) -> None:
    """`ways`: the travel times of each question and its answer."""
    own = [BEGIN]
    left = iter(ways)

    def ask() -> ClockAnswer:
        there, back = next(left)
        received = own[0] + there - offset
        own[0] += there + 300 + back
        return ClockAnswer(received, received + 300)

    reading = read_clock(ask, lambda: own[0], len(ways))
    assert abs(reading.offset_ns - offset) <= reading.error_ns
    assert reading.round_trip_ns == min(there + back for there, back in ways)


def test_comparison_across_a_clock_change_is_discarded() -> None:
    answers = iter([ClockAnswer(50, 50), ClockAnswer(1000, 1000)])
    clock = iter([100, -5000, 990, 1010])
    assert read_clock(lambda: next(answers), lambda: next(clock), 2) == ClockReading(990, ClockAnswer(1000, 1000), 1010)
