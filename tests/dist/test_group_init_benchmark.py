"""The benchmark of group creation: ranks send the requests that its model counts, and create the planned groups."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import distributed as dist

from benchmarks.group_init import seconds_of
from benchmarks.group_init_ranks import OURS, SIDES, TORCH_BARRIER, GroupInitOrders, GroupInitRecord, create_all
from benchmarks.group_init_requests import Costs, busy_s, group_requests, nccl_requests, world_requests
from megatrain.comm.group_plan import planned_groups
from megatrain.contracts.layout import Layout
from tests.helpers.rank_pool import RankPool

COSTS = Costs({"set": 1.0, "get": 10.0, "wait": 100.0, "add": 1000.0, "multi_get": 10000.0}, key_s=0.5)


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def without_set(requests: Counter[str]) -> Counter[str]:
    return Counter({kind: count for kind, count in requests.items() if kind != "set" and count})


@pytest.mark.slow(kept=["ours-pp_size=1 dp_size=3 tp_size=1", "torch-pp_size=1 dp_size=3 tp_size=1"])
@pytest.mark.parametrize(
    "layout", [Layout(tp_size=2, pp_size=2, dp_size=2), Layout(pp_size=4), Layout(dp_size=3)], ids=str
)
@pytest.mark.parametrize("side", SIDES)
def test_model_counts_the_requests_of_real_ranks(
    rank_pool: RankPool, server: dist.TCPStore, layout: Layout, side: str
) -> None:
    orders = GroupInitOrders(side, layout, server.port, f"{layout}/{side}", is_counted=True)
    records: list[GroupInitRecord] = rank_pool.run(create_all, layout.world_size, orders)

    assert seconds_of(records) > 0
    for rank, record in enumerate(records):
        own = [planned for planned in planned_groups(layout, rank) if len(planned.ranks) > 1]
        assert record.sums == {planned.name: (len(planned.ranks), len(planned.ranks)) for planned in own}
        groups, world = group_requests(side, layout, rank), world_requests(side, layout, rank)
        if side != TORCH_BARRIER:
            assert (record.group_requests, record.world_requests) == (groups, world)
        else:
            # By chance, one or two ranks find that they arrive last.
            assert without_set(record.group_requests) == without_set(groups)
            assert without_set(record.world_requests) == without_set(world)
    total = sum((record.group_requests for record in records), Counter[str]())
    modeled = sum((group_requests(side, layout, rank) for rank in range(layout.world_size)), Counter[str]())
    assert total["set"] >= modeled["set"]


@pytest.mark.parametrize("side", SIDES)
def test_busy_time_counts_the_requests_of_all_ranks(side: str) -> None:
    layout = Layout(tp_size=2, pp_size=3, dp_size=2)
    ranks = range(layout.world_size)
    groups = sum((group_requests(side, layout, rank) for rank in ranks), Counter[str]())
    world = sum((world_requests(side, layout, rank) for rank in ranks), Counter[str]())
    num_keys = 0
    if side == OURS:
        num_keys = sum(
            len(group.ranks) for rank in ranks for group in planned_groups(layout, rank) if len(group.ranks) > 1
        )
    assert busy_s(side, layout, COSTS) == pytest.approx((COSTS.of(groups, num_keys), COSTS.of(world)))


def test_requests_of_a_rank_do_not_grow_with_the_world() -> None:
    worlds = [Layout(tp_size=8, pp_size=8, dp_size=dp_size) for dp_size in (16, 32, 64, 128)]
    assert {group_requests(OURS, layout, 0).total() for layout in worlds} == {18}
    assert {nccl_requests(layout, 0).total() for layout in worlds} == {24}
    # Groups with more members than one read returns: one additional request for each 128.
    assert group_requests(OURS, Layout(tp_size=8, pp_size=8, dp_size=192), 0).total() == 18 + 2
    assert not world_requests(OURS, Layout(tp_size=8, pp_size=8, dp_size=192), 0)
