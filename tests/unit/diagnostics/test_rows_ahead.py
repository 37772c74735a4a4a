"""Rows of a later round wait until it begins; they do not end the current round."""

from __future__ import annotations

from megatrain_diagnostics.collector.rows_ahead import RowsAhead
from megatrain_diagnostics.events.tables import Spans, joined
from tests.helpers.event_collector import span_rows


def places_of(ahead: RowsAhead, *tables: Spans) -> list[tuple[int, int]]:
    """Return (round, sequence) of the rows that are passed on."""
    found = []
    for _, table in ahead.take([(Spans, one) for one in tables]):
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
