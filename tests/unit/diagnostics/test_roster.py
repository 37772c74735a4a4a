"""The ranks of a round and their layout, where some ranks send wrong rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.events.roster import make_roster, newest_round
from megatrain_diagnostics.events.tables import Ranks, joined, select
from tests.helpers.synthetic_steps import SyntheticJob, empty_groups

RANKS = SyntheticJob(Layout(tp_size=2, dp_size=2)).ranks()


def test_majority_of_ranks_decides_the_layout() -> None:
    lie = np.where(RANKS.rank == 3, 2**31 - 1, RANKS.dp_size).astype(np.int32)
    roster = make_roster(replace(RANKS, dp_size=lie), empty_groups(), 1)
    assert roster.layout == Layout(tp_size=2, dp_size=2)
    assert sorted(roster.hosts) == [0, 1, 2]
    stranger = replace(select(RANKS, [0]), rank=np.array([9], dtype=np.int32))
    assert sorted(make_roster(joined(type(RANKS), [RANKS, stranger]), empty_groups(), 1).hosts) == [0, 1, 2, 3]


def test_a_rank_that_corrects_itself_counts_once() -> None:
    wrong = replace(RANKS, dp_size=RANKS.dp_size * 2, at_ns=RANKS.at_ns - 5)
    assert make_roster(joined(type(RANKS), [RANKS, wrong]), empty_groups(), 1).layout.dp_size == 2


def test_layout_without_a_majority_is_an_error() -> None:
    split = np.where(RANKS.rank < 2, 4, RANKS.dp_size).astype(np.int32)
    with pytest.raises(DataError, match=r"different layouts .*\(1, 2, 1, 2, 1\), \(1, 4, 1, 2, 1\)"):
        make_roster(replace(RANKS, dp_size=split), empty_groups(), 1)


def test_impossibly_large_layout_is_refused() -> None:
    """An untrusted directory must not make its reader build tables of two billion ranks."""
    with pytest.raises(DataError, match="no job is that large"):
        make_roster(replace(RANKS, dp_size=np.full_like(RANKS.dp_size, 2**31 - 1)), empty_groups(), 1)


def test_newest_round_is_reported_by_half_of_its_ranks() -> None:
    def ranks_of(round_number: int, count: int) -> Ranks:
        some = select(RANKS, list(range(count)))
        return replace(some, round=np.full_like(some.round, round_number))

    assert newest_round(joined(Ranks, [RANKS, ranks_of(6, 1)])) == 1
    assert newest_round(joined(Ranks, [RANKS, ranks_of(2, 2), ranks_of(6, 1)])) == 2
    assert newest_round(joined(Ranks, [ranks_of(3, 1), ranks_of(2, 1)])) == 3
