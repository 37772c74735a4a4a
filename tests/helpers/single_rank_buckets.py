"""One module whose parameters are in the buckets of a rank without peers, as a chunk's are in training."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatrain.parallel.boxes import Box
from megatrain.parallel.bucket import Bucket
from megatrain.parallel.data_parallel import ChunkDataParallel, DataParallelOptions
from megatrain.parallel.placement import Placement, ShardHolders
from megatrain.parallel.sharding import LogicalParameter
from tests.helpers.single_rank import simulated_group


def held_whole(name: str, parameter: nn.Parameter) -> LogicalParameter:
    """Return a parameter that each rank of the group dp holds completely, and no other rank holds."""
    shape = tuple(parameter.shape)
    return LogicalParameter(parameter, (Placement(name, shape, Box((0,) * len(shape), shape)),))


def give_holders(bucket: Bucket, holders: ShardHolders) -> None:
    """Let other ranks hold the whole bucket; the group that sums it stays the same."""
    bucket.parameters = tuple(
        replace(logical, placements=tuple(replace(placement, holders=holders) for placement in logical.placements))
        for logical in bucket.parameters
    )


def put_in_buckets(module: nn.Module, dtype: torch.dtype, device: torch.device) -> ChunkDataParallel:
    """Give `module`, which is on meta, memory in buckets of `dtype` with fp32 gradients, and random values."""
    parameters = [held_whole(name, parameter) for name, parameter in module.named_parameters()]
    options = DataParallelOptions(
        zero_stage=1,
        dtype=dtype,
        gradient_dtype=torch.float32,
        reduce_dtype=torch.float32,
        bucket_size=1 << 20,
        has_overlap=False,
    )
    chunk = ChunkDataParallel(parameters, {"dp": simulated_group("dp", 1, 0)}, options, device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(1 + torch.randn(parameter.shape, generator=generator))
    return chunk


def bucket_gradients(chunk: ChunkDataParallel) -> dict[str, Tensor]:
    """Return the content of the buckets, by the parameters' names."""
    found: dict[str, Tensor] = {}
    for bucket in chunk.buckets:
        gradients = bucket.finished_gradients()
        for logical, start in zip(bucket.parameters, bucket.starts, strict=True):
            shape = logical.parameter.shape
            found[logical.name] = gradients[start : start + shape.numel()].view(shape)
    return found
