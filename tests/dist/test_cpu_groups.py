"""Exchanges over CPU memory (plans, agreements, sums) give the same results in every kind of layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.comm.cpu_groups import gather_json_in
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import REPLICAS, Layout
from tests.helpers.joined_mesh import joined_mesh
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.single_rank import SilentRecorder

LAYOUTS = [
    Layout(tp_size=2, pp_size=2, dp_size=2),
    Layout(pp_size=2, dp_size=2),
    Layout(tp_size=8),
    Layout(dp_size=3),
    Layout(),
    Layout(pp_size=2, cp_size=2, tp_size=2, ep_size=2),
    Layout(dp_size=2, cp_size=2, tp_size=2, ep_size=4),
]


def plan_of(rank: int) -> dict[str, Any]:
    """Return an object whose length differs between ranks."""
    return {"rank": rank, "items": [[rank, "caf\u00e9"]] * (rank * 37)}


def replicas_of(layout: Layout) -> set[tuple[str, ...]]:
    """Return, for each axis, the axes along which its ranks and their neighbors hold the same data."""
    return {layout.replica_axes(axis) for axis in REPLICAS if axis in layout.axes}


def talk(context: RankContext, layout: Layout) -> dict[str, Any]:
    rank, world_size = context.rank, layout.world_size
    mesh = joined_mesh(context, layout, SilentRecorder())
    cpu_groups = mesh.cpu_groups
    return {
        "gathered": cpu_groups.gather_json(rank, plan_of(rank)),
        "broadcast": cpu_groups.broadcast_json(plan_of(5) if rank == 0 else None),
        "nothing": cpu_groups.broadcast_json(None),
        "minimum": cpu_groups.minimum([rank, -rank, 7]),
        "all": cpu_groups.all_agree(True),
        "one refuses": cpu_groups.all_agree(rank != world_size - 1),
        "of replicas": gather_json_in(cpu_groups.replicas, plan_of(rank)),
        "along": {
            axes: cpu_groups.all_gather(axes, torch.tensor([rank, -rank]), Operation.CHECKSUM)
            for axes in replicas_of(layout)
        },
        "replicas": cpu_groups.replicas.ranks,
        "num_calls": cpu_groups.num_calls,
        "sum": mesh.sum_over_all(torch.tensor([float(rank)])).item(),
    }


@pytest.mark.slow(kept=["pp_size=1 dp_size=1 tp_size=1", "pp_size=2 dp_size=2 tp_size=1"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_exchange_values_on_host_memory(layout: Layout, rank_pool: RankPool) -> None:
    world_size = layout.world_size
    answers = rank_pool.run(talk, world_size, layout)

    assert [answer["gathered"] for answer in answers] == [
        [plan_of(rank) for rank in range(world_size)],
        *([None] * (world_size - 1)),
    ]
    for rank, answer in enumerate(answers):
        assert answer["along"] == {
            axes: [(member, -member) for member in layout.ranks_along(rank, *axes)] for axes in replicas_of(layout)
        }
        assert answer["broadcast"] == plan_of(5)
        assert answer["nothing"] is None
        assert answer["minimum"] == [0, 1 - world_size, 7]
        assert answer["all"]
        assert answer["sum"] == sum(range(world_size))
        assert not answer["one refuses"]
        assert answer["replicas"] == layout.ranks_along(rank, "dp", "cp")
        assert answer["of replicas"] == [plan_of(member) for member in answer["replicas"]]
        assert (answer["num_calls"] > 0) == (world_size > 1)
