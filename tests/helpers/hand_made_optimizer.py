"""A sharded optimizer over parameters made by hand, as any data-parallel rank would hold it, with gradients by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.comm.mesh import Mesh
from megatrain.config.optimizer import OptimizerConfig
from megatrain.optim import ShardedOptimizer
from megatrain.parallel.data_parallel import ChunkDataParallel, DataParallelOptions
from megatrain.parallel.sharding import LogicalParameter
from tests.helpers.lone_rank import lone_mesh, simulated_group

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.word.weight": (9, 8),
    "blocks.0.norm.weight": (8,),
    "blocks.0.norm.bias": (8,),
    "blocks.0.mlp.up.weight": (1, 24, 8),
    "blocks.0.mlp.up.bias": (1, 24),
    "blocks.0.mlp.down.weight": (8, 24),
    "blocks.0.mlp_bias": (8,),
}
DECAYED = {name for name in SHAPES if name.endswith("weight") and "norm" not in name}


def draw(seed: int) -> dict[str, Tensor]:
    """Return an fp64 tensor for each parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in SHAPES.items()}


@dataclass
class Rank:
    """One data-parallel rank's optimizer."""

    optimizer: ShardedOptimizer
    chunk: ChunkDataParallel

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Put this rank's part of whole gradients where a finished reduction leaves them."""
        self.chunk.start_step()
        for bucket in self.chunk.buckets:
            for index, logical in enumerate(bucket.parameters):
                bucket.add_gradient(index, gradients[logical.name])

    def shards(self, kind: str) -> dict[str, list[Tensor]]:
        """Return flat pieces of one kind of state, in order."""
        found: dict[str, list[Tensor]] = {}
        for one, shard, _ in self.optimizer.flat_shards():
            if one == kind:
                found.setdefault(shard.name, []).append(shard.tensor.flatten().clone())
        return found


def whole_state(ranks: list[Rank], kind: str = "master") -> dict[str, Tensor]:
    """Join the ranks' pieces."""
    pieces: dict[str, list[Tensor]] = {name: [] for name in SHAPES}
    for rank in ranks:
        for name, parts in rank.shards(kind).items():
            pieces[name] += parts
    return {name: torch.cat(parts).view(SHAPES[name]) for name, parts in pieces.items()}


def build_rank(
    dp_size: int = 1,
    dp_rank: int = 0,
    *,
    dtype: torch.dtype = torch.float64,
    weights: Mapping[str, Tensor] | None = None,
    bucket_size: int = 150,
    mesh: Mesh | None = None,
    **options: Any,
) -> Rank:
    """Return rank `dp_rank` of `dp_size` with the weights `draw(0)`, or those given. `options` are the optimizer's."""
    mesh = mesh or replace(lone_mesh(), dp=simulated_group("dp", dp_size, dp_rank))
    logical = [
        LogicalParameter(
            name, nn.Parameter(torch.empty(shape, device="meta")), shape, (0,) * len(shape), is_tp_sharded=True
        )
        for name, shape in SHAPES.items()
    ]
    gradient_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    settings = DataParallelOptions(
        zero_stage=1,
        dtype=dtype,
        gradient_dtype=gradient_dtype,
        reduce_dtype=gradient_dtype,
        bucket_size=bucket_size,
        has_overlap=True,
    )
    chunk = ChunkDataParallel(logical, mesh.dp, mesh.tp, mesh.embedding, settings, torch.device("cpu"))
    config = OptimizerConfig(**({"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8} | options))
    rank = Rank(ShardedOptimizer([chunk], config, mesh), chunk)
    start = draw(0) if weights is None else weights
    for kind, shard, _ in rank.optimizer.flat_shards():
        if kind == "master":
            part = tuple(slice(at, at + size) for at, size in zip(shard.box.offsets, shard.box.sizes, strict=True))
            shard.tensor.copy_(start[shard.name][part])
    rank.optimizer.publish()
    return rank
