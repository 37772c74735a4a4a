"""Gradients of parameters that ranks hold along several axes: each shard has the sum over all holders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain.parallel.data_parallel import ChunkDataParallel, DataParallelOptions
from megatrain.parallel.placement import Cut, PlacementRow, placements_of, tensor_shape
from megatrain.parallel.sharding import LogicalParameter
from tests.helpers.joined_mesh import joined_mesh
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.single_rank import SilentRecorder

SHAPE = (8, 96)
CASES = {
    "state over dp and cp": (PlacementRow("w"), Layout(dp_size=2, cp_size=2)),
    "state over dp and cp, cut over tp": (PlacementRow("w", Cut("tp", 0)), Layout(dp_size=2, cp_size=2, tp_size=2)),
    "state over dp and cp, sum over tp": (
        PlacementRow("w", sum_groups=("tp",)), Layout(dp_size=2, cp_size=2, tp_size=2),
    ),
    "state over dp, sums over cp and tp": (
        PlacementRow("w", replica_axes=("dp",), sum_groups=("cp", "tp")), Layout(dp_size=2, cp_size=2, tp_size=2),
    ),
}  # fmt: skip


def gradient_of(rank: int) -> torch.Tensor:
    """Return the term that a rank adds to the whole parameter: powers of two, so each sum shows which ranks it
    contains."""
    return torch.full(SHAPE, 2.0**rank, dtype=torch.float64)


def sum_on_rank(context: RankContext, row: PlacementRow, layout: Layout) -> list[tuple[Any, torch.Tensor]]:
    """Run as a rank with one parameter; return the boxes of its shard with their summed gradients, and the token
    count."""
    rank, mesh = context.rank, joined_mesh(context, layout, SilentRecorder())
    placements = placements_of("w", SHAPE, row, layout, rank)
    parameter = nn.Parameter(torch.zeros(tensor_shape(placements), dtype=torch.float64))
    options = DataParallelOptions(1, torch.float64, torch.float64, torch.float64, bucket_size=1, has_overlap=True)
    chunk = ChunkDataParallel([LogicalParameter(parameter, placements)], mesh.by_name, options, mesh.device)
    chunk.start_step()
    (box,) = (placement.box for placement in placements)
    own = gradient_of(rank)[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]
    (parameter * own).sum().backward()
    chunk.reduce()
    chunk.finish_reduce()
    (bucket,) = chunk.buckets
    tokens = torch.tensor([2.0**rank], dtype=torch.float64)
    mesh.replicas.all_reduce(tokens, Operation.DP_ALL_REDUCE).wait()
    found = [(shard.box, shard.tensor.clone()) for shard in bucket.flat_shards(chunk.gradient_shard(bucket))]
    return [*found, (None, tokens)]


@pytest.mark.slow(kept=["state over dp and cp"])
@pytest.mark.parametrize("case", CASES)
def test_shards_have_the_sum_over_all_holders_of_the_part(case: str, rank_pool: RankPool) -> None:
    row, layout = CASES[case]
    held = torch.zeros(SHAPE)
    for rank, (*shards, (_, tokens)) in enumerate(rank_pool.run(sum_on_rank, layout.world_size, row, layout)):
        same_stage = range(layout.world_size)
        holders = [one for one in same_stage if row.cut is None or layout.index("tp", one) == layout.index("tp", rank)]
        for box, summed in shards:
            assert (summed == sum(2.0**holder for holder in holders)).all()
            held[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] += 1
        assert tokens.item() == sum(2.0**one for one in layout.ranks_along(rank, "dp", "cp"))
    copies = layout.world_size // (4 if row.replica_axes == ("dp", "cp") else 2) // (1 if row.cut is None else 2)
    assert (held == copies).all()
