"""A sharded optimizer over parameters that a test defines, as any rank would hold it, with gradients by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.comm.group import Group
from megatrain.comm.mesh import Mesh
from megatrain.config.optimizer import OptimizerConfig, ParameterGroupConfig
from megatrain.optim import ShardedOptimizer
from megatrain.parallel.boxes import Box
from megatrain.parallel.data_parallel import ChunkDataParallel, DataParallelOptions
from megatrain.parallel.logical_matrices import HiddenWeight, matrices_of
from megatrain.parallel.placement import SOLE_HOLDER, Placement, ShardHolders
from megatrain.parallel.sharding import LogicalParameter
from megatrain.parallel.update_rules import update_rule
from tests.helpers.single_rank import simulated_group, single_rank_mesh

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.word.weight": (9, 8),
    "blocks.0.norm.weight": (8,),
    "blocks.0.norm.bias": (8,),
    "blocks.0.mlp.up.weight": (1, 24, 8),
    "blocks.0.mlp.up.bias": (1, 24),
    "blocks.0.mlp.down.weight": (8, 24),
    "blocks.0.mlp_bias": (8,),
}
CUT = {"embedding.word.weight", "blocks.0.mlp.up.weight"}
"""The parameters that tensor-parallel ranks divide, along the last dim; each rank holds the others completely."""
HIDDEN = {"blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight"}
"""The matrices between hidden states."""
DECAYED = {name for name in SHAPES if name.endswith("weight") and "norm" not in name}


def draw(seed: int) -> dict[str, Tensor]:
    """Return an fp64 tensor for each parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in SHAPES.items()}


@dataclass
class Rank:
    """One rank's optimizer."""

    optimizer: ShardedOptimizer
    chunk: ChunkDataParallel

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Write this rank's part of whole gradients to the place of a finished reduction."""
        self.chunk.start_step()
        for bucket in self.chunk.buckets:
            for index, logical in enumerate(bucket.parameters):
                (placement,) = logical.placements
                box = placement.box
                part = box_slices(box.offsets, box.sizes)
                bucket.take_gradient(index)[0].copy_(gradients[logical.name][part])


def box_slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))


def whole_state(ranks: list[Rank], kind: str = "master") -> dict[str, Tensor]:
    """Join the ranks' pieces; replicas must agree bit by bit, and no element may be missing."""
    found: dict[str, Tensor] = {}
    for rank in ranks:
        for one, shard, _ in rank.optimizer.flat_shards():
            if one != kind:
                continue
            whole = found.setdefault(shard.name, torch.full(shard.global_shape, torch.nan, dtype=shard.tensor.dtype))
            part = box_slices(shard.box.offsets, shard.box.sizes)
            assert (whole[part].isnan() | (whole[part] == shard.tensor)).all(), f"replicas of {shard.name} differ"
            whole[part] = shard.tensor
    assert not any(whole.isnan().any() for whole in found.values())
    return {name: found[name] for name in SHAPES}


def build_rank(
    dp_size: int = 1,
    dp_rank: int = 0,
    *,
    dtype: torch.dtype = torch.float64,
    weights: Mapping[str, Tensor] | None = None,
    bucket_size: int = 150,
    mesh: Mesh | None = None,
    groups: Sequence[ParameterGroupConfig] = (),
    **options: Any,
) -> Rank:
    """Return rank `dp_rank` of `dp_size`, or that of `mesh`, with the weights `draw(0)`, or the given ones. `options`
    are the optimizer's."""
    mesh = mesh or single_rank_mesh(dp=simulated_group("dp", dp_size, dp_rank))
    config = OptimizerConfig(**({"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8} | options))
    logical = [_logical(name, shape, mesh.tp, config, groups) for name, shape in SHAPES.items()]
    gradient_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    settings = DataParallelOptions(
        zero_stage=1,
        dtype=dtype,
        gradient_dtype=gradient_dtype,
        reduce_dtype=gradient_dtype,
        bucket_size=bucket_size,
        has_overlap=True,
    )
    chunk = ChunkDataParallel(logical, mesh.by_name, settings, torch.device("cpu"))
    rank = Rank(ShardedOptimizer([chunk], config, mesh), chunk)
    start = draw(0) if weights is None else weights
    for kind, shard, _ in rank.optimizer.flat_shards():
        if kind == "master":
            shard.tensor.copy_(start[shard.name][box_slices(shard.box.offsets, shard.box.sizes)])
    rank.optimizer.copy_to_parameters()
    return rank


def _logical(
    name: str, shape: tuple[int, ...], tp: Group, config: OptimizerConfig, groups: Sequence[ParameterGroupConfig]
) -> LogicalParameter:
    is_cut = name in CUT
    last = shape[-1] // tp.size if is_cut else shape[-1]
    boxes = [Box((*(0 for _ in shape[1:]), rank * last * is_cut), (*shape[:-1], last)) for rank in range(tp.size)]
    parameter = nn.Parameter(torch.empty((*shape[:-1], last), device="meta"))
    # Without tensor parallelism all parameters are alike, so one bucket may hold any of them.
    holders = SOLE_HOLDER if is_cut or tp.size == 1 else ShardHolders(("tp",), tp.rank, tp.size)
    hidden = (
        HiddenWeight(matrices_of(name, shape, None), tuple((box,) for box in boxes), "tp") if name in HIDDEN else None
    )
    return LogicalParameter(
        parameter,
        (Placement(name, shape, boxes[tp.rank], holders=holders),),
        hidden=hidden,
        rule=update_rule(config, groups, name, is_hidden_weight=name in HIDDEN),
    )
