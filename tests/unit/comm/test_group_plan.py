"""All ranks create their groups in one order of the whole world, so they never wait for each other in a circle."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from megatrain.comm.group_plan import PlannedGroup, all_planned_groups, planned_groups, summing_order
from megatrain.contracts.layout import DENSE, Holders, Layout

SIZES = (1, 2, 4)
SMALL = [
    (Layout(tp_size=tp_size, pp_size=pp_size, dp_size=dp_size), has_wrap_links)
    for tp_size, pp_size, dp_size in itertools.product(SIZES, repeat=3)
    for has_wrap_links in (False, True)
] + [
    (Layout(cp_size=2, pp_size=pp_size, dp_size=2, tp_size=tp_size, ep_size=ep_size), True)
    for pp_size, tp_size, ep_size in itertools.product((1, 2), (1, 2), SIZES)
]
LARGE = [
    (Layout(tp_size=8, pp_size=8, dp_size=192), True),
    (Layout(tp_size=8, pp_size=2, dp_size=768), True),
    (Layout(tp_size=8, pp_size=48, dp_size=32), False),
]


def plans(layout: Layout, has_wrap_links: bool, ranks: Sequence[int]) -> dict[int, list[PlannedGroup]]:
    """Return the groups that each of some ranks creates; groups of one are not created."""
    return {
        rank: [plan for plan in planned_groups(layout, rank, has_wrap_links=has_wrap_links) if len(plan.ranks) > 1]
        for rank in ranks
    }


def by_member(groups: Sequence[PlannedGroup]) -> dict[int, list[PlannedGroup]]:
    """Return each rank's part of the world's order."""
    found: dict[int, list[PlannedGroup]] = defaultdict(list)
    for group in groups:
        for rank in group.ranks:
            found[rank].append(group)
    return found


def created_in_turn(plans: Mapping[int, Sequence[PlannedGroup]]) -> set[str]:
    """Let each rank stay in its next group until all members are in it. Return the created groups when no rank can
    continue."""
    reached = dict.fromkeys(plans, 0)
    created: set[str] = set()
    inside: dict[str, int] = defaultdict(int)
    entering = list(plans)
    while entering:
        rank = entering.pop()
        if reached[rank] == len(plans[rank]):
            continue
        group = plans[rank][reached[rank]]
        inside[group.key] += 1
        if inside[group.key] == len(group.ranks):
            created.add(group.key)
            for member in group.ranks:
                reached[member] += 1
                entering.append(member)
    return created


@pytest.mark.slow(kept=["small"])
@pytest.mark.parametrize("layouts", [SMALL, LARGE], ids=["small", "large"])
def test_ranks_create_their_groups_in_one_order(layouts: list[tuple[Layout, bool]]) -> None:
    for layout, has_wrap_links in layouts:
        case = f"{layout}, wrap links: {has_wrap_links}"
        groups = list(all_planned_groups(layout, has_wrap_links=has_wrap_links))
        parts = by_member(groups)
        ranks = range(layout.world_size) if layout.world_size <= 64 else [0, 1, 4095, 6144, layout.world_size - 1]
        for rank, plan in plans(layout, has_wrap_links, ranks).items():
            assert plan == parts[rank], f"{case}: rank {rank} creates its own groups, in the order of all"
        assert len({group.key for group in groups}) == len(groups), f"{case}: no two groups have the same key"
        assert created_in_turn(parts) == {group.key for group in groups}, f"{case}: ranks wait for each other"


def test_ranks_with_different_orders_wait_for_each_other() -> None:
    """The deadlock that the test above would detect."""
    one, other = PlannedGroup("one", (0, 1)), PlannedGroup("other", (0, 1))
    assert created_in_turn({0: [one, other], 1: [other, one]}) == set()


def partitions_of(layout: Layout, axes: Sequence[str]) -> dict[str, set[tuple[int, ...]]]:
    """Return, for each axis of more than one rank, the ranks of each group along it. `axes` number the ranks."""
    grid = np.arange(layout.world_size).reshape([layout.size(axis) for axis in axes])
    return {
        name: {tuple(members) for members in np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]).tolist()}
        if grid.shape[axis] > 1
        else set()
        for axis, name in enumerate(axes)
    }


@pytest.mark.slow(kept=["small"])
@pytest.mark.parametrize("layouts", [SMALL, LARGE], ids=["small", "large"])
def test_groups_of_a_name_are_those_of_the_layout(layouts: list[tuple[Layout, bool]]) -> None:
    for layout, has_wrap_links in layouts:
        assert_groups_by_name(layout, has_wrap_links)


def assert_groups_by_name(layout: Layout, has_wrap_links: bool) -> None:
    case = f"{layout}, wrap links: {has_wrap_links}"
    found: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for group in all_planned_groups(layout, has_wrap_links=has_wrap_links):
        assert not found[group.name].intersection([group.ranks]), case
        found[group.name].add(group.ranks)
    partitions = partitions_of(layout, ("pp", *DENSE))
    if layout.size("ep") > 1:
        partitions |= partitions_of(layout, ("pp", "edp", "ep"))
    expected = {**partitions, **{f"host-{name}": groups for name, groups in partitions.items()}}
    if min(layout.dp_size, layout.size("cp")) > 1:
        grid = np.arange(layout.world_size).reshape([layout.size(axis) for axis in ("pp", *DENSE)])
        same = np.moveaxis(grid, -1, 1).reshape(-1, layout.dp_size * layout.size("cp"))
        expected["dp-cp"] = expected["host-dp-cp"] = {tuple(members) for members in same.tolist()}
    pipelines = partitions["pp"]
    expected["embedding"] = {(members[0], members[-1]) for members in pipelines}
    expected |= dict.fromkeys(("pp-forward", "pp-backward"), pipelines)
    if has_wrap_links and layout.pp_size == 2:
        expected |= dict.fromkeys(("pp-forward-wrap", "pp-backward-wrap"), pipelines)
    assert found == {name: groups for name, groups in expected.items() if groups}, case
    for groups in found.values():
        members = [rank for group in groups for rank in group]
        assert len(set(members)) == len(members), f"{case}: no rank is in two groups of a name"


@pytest.mark.parametrize(
    ("layout", "num_groups"),
    [
        (Layout(tp_size=4, pp_size=2, dp_size=2), 2),
        (Layout(tp_size=4, dp_size=3), 1),
        (Layout(tp_size=8, pp_size=3), 4),
    ],
    ids=str,
)
def test_holders_of_a_part_are_groups_before_the_links(layout: Layout, num_groups: int) -> None:
    holders = Holders("tp", num_groups)
    everything = list(all_planned_groups(layout, holders=[holders]))
    own = {
        rank: [group for group in planned_groups(layout, rank, holders=[holders]) if len(group.ranks) > 1]
        for rank in range(layout.world_size)
    }
    length = layout.tp_size // num_groups
    expected = np.arange(layout.world_size).reshape(-1, length)

    assert [one.ranks for one in everything if one.name == f"tp-in-{num_groups}"] == [*map(tuple, expected.tolist())]
    assert by_member(everything) == own
    assert created_in_turn(own) == {one.key for one in everything}
    without = [one for one in everything if one.name != holders.name]
    assert without == list(all_planned_groups(layout)), "no other group differs, or has another position in the order"
    names = list(dict.fromkeys(one.name for one in everything))
    assert not any("pp-" in name for name in names[: names.index(holders.name)])


def test_summing_and_creation_orders_are_fixed() -> None:
    """The order of sums decides the bits of a sum over all ranks; the order of creation decides which ranks wait."""
    assert summing_order(Layout()) == ("tp", "pp", "dp")
    layout = Layout(pp_size=2, dp_size=2, cp_size=2, tp_size=2, ep_size=2)
    assert summing_order(layout) == ("tp", "pp", "cp", "dp")
    assert [planned.name for planned in planned_groups(layout, 0)] == [
        *("tp", "cp", "dp", "pp", "ep", "edp", "dp-cp", "host-tp", "host-pp", "host-cp", "host-dp"),
        *("host-ep", "host-edp", "host-dp-cp", "embedding", "pp-forward", "pp-backward"),
    ]
    assert [planned.name for planned in planned_groups(Layout(), 0)] == [
        *("tp", "dp", "pp", "host-tp", "host-pp", "host-dp", "embedding")
    ]


@pytest.mark.parametrize(
    ("layout", "of_replicas"),
    [
        (Layout(dp_size=2, tp_size=2), ("dp",)),
        (Layout(cp_size=2, tp_size=2), ("cp",)),
        (Layout(dp_size=2, cp_size=2, tp_size=2), ("dp", "dp-cp")),
        (Layout(dp_size=4, pp_size=2, ep_size=2), ("dp", "edp")),
        (Layout(dp_size=2, ep_size=2), ("dp",)),
    ],
    ids=str,
)
def test_groups_of_replicas_are_marked_and_awaited_later(layout: Layout, of_replicas: tuple[str, ...]) -> None:
    for rank in range(layout.world_size):
        planned = [one for one in planned_groups(layout, rank, holders=[Holders("tp", 1)]) if len(one.ranks) > 1]
        links = {one.name for one in planned if one.is_link}
        assert {one.name for one in planned if one.is_of_replicas} == set(of_replicas)
        for has_sequence_chunks in (False, True):
            later = {one.name for one in planned if one.is_awaited_later(has_sequence_chunks=has_sequence_chunks)}
            chunked = {"tp"} if has_sequence_chunks and layout.tp_size > 1 else set()
            assert later == {*of_replicas, *links, *chunked}


def test_groups_on_the_host_and_links_are_marked() -> None:
    planned = planned_groups(Layout(tp_size=2, pp_size=2, dp_size=2), 5, has_wrap_links=True)
    names = {plan.name: plan for plan in planned}
    assert {name for name, plan in names.items() if plan.uses_cpu_memory} == {"host-tp", "host-pp", "host-dp"}
    assert {name for name, plan in names.items() if plan.is_link} == {
        "pp-forward", "pp-backward", "pp-forward-wrap", "pp-backward-wrap"
    }  # fmt: skip
    assert (names["dp"].ranks, names["dp"].key) == ((5, 7), "dp-5")
