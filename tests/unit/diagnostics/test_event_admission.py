"""The rows of a batch that are admitted or refused and counted; rows of a later round wait until it begins."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.layout import Layout
from megatrain_diagnostics.collector.admission import Admission, Admitted, RefusedBatchError, RowRateLimiter
from megatrain_diagnostics.collector.counters import IngestStatistics, LostRowsReporter, RejectionReason
from megatrain_diagnostics.collector.rounds_known import KnownRounds
from megatrain_diagnostics.collector.rows_ahead import RowsAhead
from megatrain_diagnostics.events.roster import axis_values
from megatrain_diagnostics.events.tables import (
    Clocks,
    Ranks,
    Spans,
    StepTotals,
    Table,
    columns_of,
    joined,
    num_rows,
)
from megatrain_diagnostics.wire.messages import BatchHeader, batch_bytes
from tests.helpers.event_collector import span_rows
from tests.helpers.table_rows import table_rows

SECOND_NS = 10**9


def admitted(table: Table, admission: Admission | None = None, *, made_ns: int = 0) -> Admitted:
    header = BatchHeader(type(table).NAME, 0, made_ns or time.time_ns())
    return (admission or Admission(KnownRounds(), RowRateLimiter())).admit("host-1", header, batch_bytes(table))


def with_one(column: str, value: int) -> Spans:
    """Return ten spans, the fourth of which has another value."""
    table = span_rows(10)
    getattr(table, column)[3] = value
    return table


def test_row_with_an_impossible_value_is_refused_alone() -> None:
    for column, value in (
        ("rank", -1), ("rank", 1 << 20), ("round", -1), ("sequence", -1), ("step", -2), ("operation", 64),
        ("duration_ns", -2), ("duration_ns", 2**62), ("start_ns", -1), ("launch_ns", -1), ("num_bytes", -1),
        ("collective", -1), ("chunk", -2), ("microbatch", -2), ("group", -1), ("flags", -1),
    ):  # fmt: skip
        found = admitted(with_one(column, value))
        assert found.refused == {RejectionReason.OUT_OF_RANGE: 1}, (column, value)
        assert found.stored["sequence"].to_pylist() == [0, 1, 2, *range(4, 10)], (column, value)
        assert found.live.sequence.tolist() == found.stored["sequence"].to_pylist()


def test_valid_rows_are_passed_on_unchanged() -> None:
    table = span_rows(10, duration_ns=-1, step=-1, chunk=-1, microbatch=-1)
    found = admitted(table)
    assert (found.refused, found.old_rows) == ({}, 0)
    for name in columns_of(Spans):
        assert found.stored[name].to_numpy().tolist() == getattr(table, name).tolist()


def test_ranks_beyond_their_round_are_refused() -> None:
    rounds = KnownRounds()
    rounds.add(4, world_size=8)
    rounds.add(5, world_size=16)
    ranks = np.array([7, 8, 15, 16])
    admission = Admission(rounds, RowRateLimiter())
    assert admitted(span_rows(4, rank=ranks, round_number=4), admission).stored["rank"].to_pylist() == [7]
    assert admitted(span_rows(4, rank=ranks, round_number=5), admission).stored["rank"].to_pylist() == [7, 8, 15]
    assert admitted(span_rows(4, rank=ranks, round_number=6), admission).stored["rank"].to_pylist() == [7, 8, 15, 16]


def test_the_oldest_of_many_rounds_are_forgotten() -> None:
    rounds = KnownRounds()
    for number in range(10_002):
        rounds.add(number, world_size=8)
    assert list(rounds.world_sizes()) == list(range(2, 10_002))


def test_rows_of_an_earlier_round_are_stored_but_not_judged() -> None:
    rounds = KnownRounds()
    rounds.add(5, world_size=16)
    found = admitted(span_rows(4, round_number=np.array([4, 5, 6, 3])), Admission(rounds, RowRateLimiter()))
    assert found.stored.num_rows == 4
    assert found.live.round.tolist() == [5, 6]
    assert found.old_rows == 2


def test_round_far_ahead_of_the_newest_is_refused() -> None:
    rounds = KnownRounds()
    rounds.add(5, world_size=16)
    found = admitted(span_rows(2, round_number=np.array([5, 2**31 - 1])), Admission(rounds, RowRateLimiter()))
    assert found.refused == {RejectionReason.UNKNOWN_ROUND: 1}


def rank_row(**columns: int) -> Ranks:
    values: dict[str, Any] = {
        "round": 2, "rank": 1, **axis_values(Layout(dp_size=2, tp_size=2), 1),
        "pid": 5, "at_ns": 1, "host": "host-1", "branch": "main",
    }  # fmt: skip
    return table_rows(Ranks, values | columns)


def test_impossible_layout_or_that_of_another_round_is_refused() -> None:
    rounds = KnownRounds()
    rounds.add(2, world_size=4)
    admission = Admission(rounds, RowRateLimiter())
    assert admitted(rank_row(), admission).refused == {}
    for column, value in (
        ("dp_size", 0), ("dp_rank", 2), ("tp_rank", -1), ("pp_size", 7), ("cp_size", 2), ("ep_rank", 1), ("pid", -1),
    ):  # fmt: skip
        refused = admitted(rank_row(**{column: value}), admission).refused
        assert refused == {RejectionReason.OUT_OF_RANGE: 1}, (column, value)


def test_without_etcd_the_rows_of_ranks_give_the_newest_round() -> None:
    admission = Admission(KnownRounds(), RowRateLimiter())
    assert admitted(span_rows(1, round_number=1), admission).old_rows == 0
    admitted(rank_row(), admission)
    assert admitted(span_rows(1, round_number=1), admission).old_rows == 1


def test_rows_an_hour_ahead_of_their_host_are_refused() -> None:
    made = 1_800_000_000 * SECOND_NS
    starts = made + np.array([0, 3_599, 3_601, 86_400]) * SECOND_NS
    found = admitted(span_rows(4, start_ns=starts), made_ns=made)
    assert found.refused == {RejectionReason.FROM_THE_FUTURE: 2}
    assert found.stored.num_rows == 2
    made = 3_000_000_000 * SECOND_NS
    assert admitted(span_rows(4, start_ns=made), made_ns=made).refused == {}, "its clock is ahead as a whole"


def test_rows_in_the_name_of_another_host_are_refused() -> None:
    found = admitted(table_rows(Clocks, {"at_ns": 1, "error_ns": 1, "host": ["host-1", "host-2"]}))
    assert found.refused == {RejectionReason.FOREIGN_HOST: 1}
    assert found.stored["host"].to_pylist() == ["host-1"]


def test_unknown_table_is_refused_as_a_whole() -> None:
    admission = Admission(KnownRounds(), RowRateLimiter())
    with pytest.raises(RefusedBatchError, match="table 'x'") as caught:
        admission.admit("host-1", BatchHeader("x", 0, 0), batch_bytes(span_rows(1)))
    assert caught.value.reason is RejectionReason.UNKNOWN_TABLE


def test_a_flood_of_one_rank_is_cut_and_its_neighbors_are_not() -> None:
    admission = Admission(KnownRounds(), RowRateLimiter(rows_per_s=100, burst_rows=1000))
    made = 1_800_000_000 * SECOND_NS
    ranks = np.concatenate([np.zeros(900), np.ones(50)]).astype(int)
    rows = span_rows(950, rank=ranks, start_ns=made)
    assert admitted(rows, admission, made_ns=made).refused == {}
    second = admitted(rows, admission, made_ns=made + SECOND_NS)  # 100 rows are left, a second allows 100 more
    assert second.refused == {RejectionReason.FLOOD: 700}
    assert np.bincount(second.live.rank).tolist() == [200, 50]
    later = admitted(rows, admission, made_ns=made + 20 * SECOND_NS)
    assert later.refused == {}


def test_replayed_spool_is_no_flood() -> None:
    limiter = RowRateLimiter(rows_per_s=100, burst_rows=1000)
    ranks = np.zeros(90, dtype=np.int32)
    for second in range(100):
        assert limiter.let_through("host-1", ranks, second * SECOND_NS) is None
    full = np.zeros(1000, dtype=np.int32)
    assert limiter.let_through("host-1", full, 200 * SECOND_NS) is None
    passed = limiter.let_through("host-1", ranks, 10 * SECOND_NS)
    assert passed is not None
    assert passed.sum() == 0
    assert limiter.let_through("host-2", ranks, 10 * SECOND_NS) is None


def test_ranks_without_rows_for_the_longest_time_are_forgotten() -> None:
    limiter = RowRateLimiter(rows_per_s=0, burst_rows=1)
    assert limiter.let_through("host-1", np.arange(100_000), 0) is None
    assert limiter.let_through("host-1", np.array([0]), 0) is not None
    assert limiter.let_through("host-2", np.array([0]), 0) is None
    again = [limiter.let_through("host-1", np.array([rank]), 0) for rank in (0, 2, 1)]
    assert [passed is None for passed in again] == [False, False, True]


@given(st.binary(max_size=600))
def test_any_bytes_are_a_batch_or_refused(content: bytes) -> None:
    admission = Admission(KnownRounds(), RowRateLimiter())
    with pytest.raises(RefusedBatchError):
        admission.admit("host-1", BatchHeader("spans", 0, 0), memoryview(content))


@settings(max_examples=60)
@given(st.integers(0, 1399), st.integers(0, 255))
def test_a_changed_byte_never_brings_down_more_than_its_batch(place: int, value: int) -> None:
    content = bytearray(batch_bytes(span_rows(3)).to_pybytes())
    content[place % len(content)] = value
    admission = Admission(KnownRounds(), RowRateLimiter())
    try:
        found = admission.admit("host-1", BatchHeader("spans", 0, time.time_ns()), memoryview(bytes(content)))
    except RefusedBatchError:
        return
    assert num_rows(found.live) + sum(found.refused.values()) <= 3


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)),
        min_size=1,
        max_size=20,
    )
)
def test_sums_of_admitted_times_never_overflow(rows: list[tuple[int, int, int]]) -> None:
    ranks, starts, sums = (np.array(column) for column in zip(*rows, strict=True))
    table = table_rows(StepTotals, {"rank": ranks, "start_ns": starts, "sum_ns": sums, "operation": 3})
    live = admitted(table, made_ns=2**62).live
    assert isinstance(live, StepTotals)
    ends = live.start_ns.astype(object) + live.sum_ns.astype(object)
    assert all(0 <= end < 2**63 for end in ends)
    assert live.sum_ns.sum() >= 0


def test_new_losses_are_reported_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    statistics = IngestStatistics()
    reporter = LostRowsReporter(statistics)
    assert reporter.report(0.0) == []
    statistics.count_refused_rows(RejectionReason.FLOOD, "host-1", 5)
    statistics.count_refused_batch(RejectionReason.NO_BATCH, "host-\x1b2", "not Arrow")
    statistics.record_dropped_rows("host-3", "life", 7)
    statistics.record_dropped_rows("host-3", "life", 9)
    statistics.record_dropped_rows("host-3", "next life", 1)
    statistics.count_refused_handshake("host 'x' has another token")
    with caplog.at_level(logging.WARNING):
        assert reporter.report(1.0) == [
            "host host-1: 5 rows rejected: flood",
            "host host-\x1b2: 1 batch rejected: no-batch, the newest: not Arrow",
            "host host-3 has dropped 10 rows that did not fit its spool",
            "1 stream refused, the newest: host 'x' has another token",
        ]
    assert "\x1b" not in caplog.text
    statistics.count_refused_rows(RejectionReason.FLOOD, "host-1", 2)
    assert reporter.report(30.0) == []
    assert reporter.report(62.0) == ["host host-1: 2 rows rejected: flood"]
    assert reporter.report(200.0) == []


def test_made_up_hosts_do_not_fill_the_memory() -> None:
    statistics = IngestStatistics()
    for number in range(10_050):
        statistics.count_refused_rows(RejectionReason.FLOOD, f"host-{number}", 1)
    refused = statistics.counters().refused_rows
    assert len(refused) <= 10_001
    assert refused[(RejectionReason.FLOOD, "others")] == 50


def places_of(ahead: RowsAhead, *tables: Spans) -> list[tuple[int, int]]:
    """Return (round, sequence) of the rows that are passed on."""
    found = []
    for table in ahead.take(list(tables)):
        assert isinstance(table, Spans)
        found += list(zip(table.round.tolist(), table.sequence.tolist(), strict=True))
    return found


def test_rows_wait_for_their_round_and_come_before_later_ones() -> None:
    newest = 3
    ahead = RowsAhead(lambda: newest, [].append)
    mixed = joined(Spans, [span_rows(2, round_number=3), span_rows(2, round_number=4, first=7)])
    assert places_of(ahead, mixed) == [(3, 0), (3, 1)]
    assert places_of(ahead, span_rows(1, round_number=9), span_rows(1, round_number=3, first=2)) == [(3, 2)]
    newest = 4
    assert places_of(ahead, span_rows(1, round_number=4, first=9)) == [(4, 7), (4, 8), (4, 9)]
    assert places_of(ahead) == []
    newest = 9
    assert places_of(ahead) == [(9, 0)]


def test_waiting_rows_are_bounded_and_dropped_ones_counted() -> None:
    newest, dropped = 0, list[int]()
    ahead = RowsAhead(lambda: newest, dropped.append, max_rows=10)
    for first in range(0, 40, 4):
        assert places_of(ahead, span_rows(4, round_number=5, first=first)) == []
    newest = 5
    assert [sequence for _, sequence in places_of(ahead)] == list(range(32, 40)), "the oldest go first"
    assert sum(dropped) == 32
