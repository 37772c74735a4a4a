"""Whole matrices of weights that are divided along different axes: each is orthogonalized as on one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatrain.contracts.layout import Layout
from megatrain.ops.orthogonalize import orthogonalized
from megatrain.parallel.bucket import Bucket, group_into_buckets
from megatrain.parallel.matrix_exchange import matrix_exchanges
from megatrain.parallel.placement import Cut, PlacementRow
from megatrain.parallel.sharding import FlatShard
from megatrain.parallel.tensor_plan import TensorPlan, apply_tensor_plan
from tests.helpers.joined_mesh import joined_mesh
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.single_rank import SilentRecorder

SHAPES = {"experts": (40, 24), "dense": (24, 40), "other_experts": (24, 32)}
TABLE = (
    PlacementRow("*experts.weight", Cut("ep", 0), replica_axes=("edp",), is_hidden_weight=True),
    PlacementRow("dense.weight", Cut("tp", 1), is_hidden_weight=True),
)
LAYOUTS = [Layout(dp_size=4, ep_size=2), Layout(dp_size=2, tp_size=2, ep_size=4), Layout(cp_size=2, tp_size=2)]


def drawn(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], dtype=torch.float64, generator=generator)


def orthogonalize_on_rank(context: RankContext, layout: Layout) -> list[FlatShard]:
    """Run as a rank with its parts of all weights; return its shards of the orthogonal matrices, multiplied by two."""
    mesh = joined_mesh(context, layout, SilentRecorder())
    names = [name for name in SHAPES if layout.size("ep") > 1 or not name.endswith("experts")]
    with torch.device("meta"):
        module = nn.ModuleDict({name: nn.Linear(*reversed(SHAPES[name]), bias=False) for name in names})
    plan = TensorPlan(TABLE, layout, context.rank, mesh.tp, recompute="none", vocab_size=8)
    double = torch.float64
    buckets = [
        Bucket(members, mesh.by_name, dtype=double, gradient_dtype=double, device=mesh.device)
        for members in group_into_buckets(apply_tensor_plan(module, plan)[0], bucket_size=10_000)
    ]
    shards = [torch.full((bucket.shard_numel,), torch.nan, dtype=double) for bucket in buckets]
    found = [one for bucket, shard in zip(buckets, shards, strict=True) for one in bucket.flat_shards(shard)]
    for one in found:
        one.tensor.copy_(part_of(drawn(one.name.removesuffix(".weight")), one))
    for exchange in matrix_exchanges(buckets, mesh.along, "master"):
        exchange.orthogonalize_(shards, lambda _: 2.0)
    return [replace(one, tensor=one.tensor.clone()) for one in found]


def part_of(whole: torch.Tensor, one: FlatShard) -> torch.Tensor:
    return whole[tuple(slice(at, at + size) for at, size in zip(one.box.offsets, one.box.sizes, strict=True))]


@pytest.mark.slow(kept=["pp_size=1 dp_size=4 tp_size=1 ep_size=2"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_matrices_cut_along_any_axis_are_whole(layout: Layout, rank_pool: RankPool) -> None:
    seen = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in SHAPES.items()}
    for shards in rank_pool.run(orthogonalize_on_rank, layout.world_size, layout):
        for one in shards:
            name = one.name.removesuffix(".weight")
            torch.testing.assert_close(one.tensor, 2.0 * part_of(orthogonalized(drawn(name)), one))
            part_of(seen[name], one).fill_(True)
    assert {name: one.all().item() for name, one in seen.items()} == {
        name: layout.size("ep") > 1 or name == "dense" for name in SHAPES
    }
