"""Copies outside of a rank's own groups, and which copies remain when a group's hosts are lost."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatrain.arena.slot_layout import SealedSnapshot
from megatrain.checkpoint.peers import MemoryPoint, choose_keepers, newest_in_memory, serving_rank
from megatrain.contracts.errors import TopologyError
from megatrain.contracts.layout import Layout


def hosts(layout: Layout, ranks_per_host: int) -> list[str]:
    return [f"host-{rank // ranks_per_host}" for rank in range(layout.world_size)]


def groups_of(layout: Layout, rank: int) -> list[tuple[int, ...]]:
    return [layout.ranks_along(rank, "tp"), layout.ranks_along(rank, "pp"), layout.ranks_along(rank, "dp")]


@pytest.mark.slow
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(2, 5),
    st.integers(2, 9),
    st.sampled_from([1, 2, 4, 8]),
)
def test_losing_the_hosts_of_any_one_group_loses_nothing(
    tp_size: int, pp_size: int, dp_size: int, ranks_per_host: int
) -> None:
    layout = Layout(tp_size=tp_size, pp_size=pp_size, dp_size=dp_size)
    host_of = hosts(layout, ranks_per_host)
    try:
        keepers = choose_keepers(layout, host_of)
    except TopologyError:
        # The message must be true: some rank has no host outside of its groups, or no shift suits all ranks.
        assume(ranks_per_host > tp_size)
        return
    assert sorted(keepers) == list(range(layout.world_size))
    for rank in range(layout.world_size):
        for group in groups_of(layout, rank):
            lost = {host_of[member] for member in group}
            for owner in range(layout.world_size):
                survivors = {host_of[owner], host_of[keepers[owner]]} - lost
                assert survivors or owner not in group, (rank, owner)


def test_pp2_dp2_with_a_rank_per_host_has_keepers() -> None:
    layout = Layout(tp_size=1, pp_size=2, dp_size=2)
    assert choose_keepers(layout, hosts(layout, 1)) == (3, 2, 1, 0)


def test_layout_without_a_host_outside_the_own_groups_is_refused() -> None:
    for (tp_size, pp_size, dp_size), ranks_per_host in [
        ((2, 1, 4), 2), ((2, 4, 1), 2), ((1, 2, 2), 4), ((1, 2, 4), 4),
    ]:  # fmt: skip
        layout = Layout(tp_size=tp_size, pp_size=pp_size, dp_size=dp_size)
        with pytest.raises(TopologyError, match=r"checkpoint\.has_peer_copies=true: .* leaves no host outside"):
            raise AssertionError(f"{layout}: {choose_keepers(layout, hosts(layout, ranks_per_host))}")


def at(*steps: int) -> list[SealedSnapshot]:
    return [SealedSnapshot(step, 0, step // 10) for step in steps]


def test_the_newest_snapshot_that_every_rank_has_decides() -> None:
    host_of = ["a", "a", "b", "b"]
    here = {0: at(40, 50), 1: at(40, 50)}
    there = {2: at(40, 50), 3: at(40)}
    held = [here, here, there, there]
    assert newest_in_memory(held, host_of) == MemoryPoint(at(40)[0], (0, 1, 2, 3))
    assert newest_in_memory([here, here, {}, {}], host_of) is None
    assert newest_in_memory([{}] * 4, host_of) is None


def test_snapshots_of_another_round_do_not_mix() -> None:
    mixed = {0: at(50), 1: [SealedSnapshot(50, 1, 5)]}
    assert newest_in_memory([mixed, mixed], ["a", "a"]) is None


def test_a_copy_stands_in_for_a_host_that_lost_its_own() -> None:
    host_of = ["a", "a", "new", "new"]
    here = {0: at(40, 50), 1: at(40, 50), 2: at(40, 50), 3: at(50), 7: at(50)}
    point = newest_in_memory([here, here, {}, {}], host_of)
    assert point == MemoryPoint(at(50)[0], (0, 1, 0, 0))
    # A rank prefers its own memory to a copy elsewhere.
    own = {2: at(50), 3: at(50)}
    assert newest_in_memory([here, here, own, own], host_of) == MemoryPoint(at(50)[0], (0, 1, 2, 3))


def test_the_ranks_of_a_host_share_the_sending() -> None:
    host_of = ["a", "a", "b", "b"]
    assert [serving_rank(0, owner, host_of) for owner in (2, 3)] == [0, 1]
    assert [serving_rank(3, owner, host_of) for owner in (0, 1)] == [2, 3]
