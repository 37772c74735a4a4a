"""The store at which a group connects: the same for all members, with an equal number of requests for each store."""

from __future__ import annotations

from collections import Counter

import pytest

from megatrain.comm.group_plan import all_planned_groups, planned_groups
from megatrain.comm.group_stores import serving_ranks, store_number
from megatrain.contracts.layout import Layout


@pytest.mark.slow(kept=["pp_size=8 dp_size=192 tp_size=8"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp_size=8, pp_size=8, dp_size=192),
        Layout(tp_size=8, pp_size=16, dp_size=96),
        Layout(tp_size=4, pp_size=3, dp_size=1024),
    ],
    ids=str,
)
def test_requests_are_spread_evenly_over_the_stores(layout: Layout) -> None:
    serving = serving_ranks(layout.world_size, 2048)
    members: Counter[int] = Counter()
    for planned in all_planned_groups(layout):
        members[store_number(planned, len(serving))] += len(planned.ranks)
    assert set(members) == set(range(6))
    assert max(members.values()) < 1.3 * members.total() / 6


def test_a_group_always_meets_at_the_same_store() -> None:
    """Every rank computes the number, so it must not depend on Python's hash, which differs between processes."""
    numbers = [store_number(planned, 5) for planned in planned_groups(Layout(tp_size=2, pp_size=2, dp_size=2), 5)]
    assert numbers == [4, 2, 4, 3, 4, 4, 1, 4, 0]


def test_each_store_serves_a_limited_number_of_ranks() -> None:
    assert list(serving_ranks(2048, 2048)) == [0]
    assert list(serving_ranks(2049, 2048)) == [0, 2048]
    assert list(serving_ranks(3, 1)) == [0, 1, 2]
