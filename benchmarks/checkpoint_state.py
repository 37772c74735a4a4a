"""The state that benchmark `checkpoint` saves: a GPT's master weights and two moments, sharded by the trainer's code.

Each value encodes its place, so values that are read back can be checked in any other cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.checkpoint.ownership import SavedShard
from megatrain.chunks.builder import build_meta_chunks
from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.parallel.bucket import Bucket, group_into_buckets
from megatrain.parallel.sharding import FlatShard

KINDS = ("master", "exp_avg", "exp_avg_sq")
_BYTES_A_PARAMETER = 4 * len(KINDS)
_VOCAB_SIZE, _SEQ_LEN, _NUM_LAYERS, _HEAD_DIM = 16384, 512, 10, 64
_PERIOD = 2**24
"""fp32 represents integers exactly up to this number."""
_SEED = 2_654_435_761


@dataclass(frozen=True, slots=True, eq=False)
class RankState:
    """One rank's shards. `flats`: the memory behind them, one tensor for each bucket and kind as in the optimizer."""

    shards: tuple[SavedShard, ...]
    flats: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(shard.shard.tensor.nbytes for shard in self.shards)

    def fill(self) -> None:
        """Give every element its value."""
        for shard in self.shards:
            shard.shard.tensor.copy_(_values(shard.kind, shard.shard))

    def clear(self) -> None:
        for flat in self.flats:
            flat.zero_()

    def is_filled(self) -> bool:
        """Return whether every element has the value that `fill` gives it."""
        return all(torch.equal(shard.shard.tensor, _values(shard.kind, shard.shard)) for shard in self.shards)


def state_tables(size_gb: float) -> dict[str, dict[str, Any]]:
    """Return the configuration of a model whose state has about this size: ten layers, with a width that fits."""
    numel = size_gb * 1e9 / _BYTES_A_PARAMETER
    linear, square = _VOCAB_SIZE + _SEQ_LEN, 12 * _NUM_LAYERS
    hidden_size = (math.sqrt(linear**2 + 4 * square * numel) - linear) / (2 * square)
    num_heads = max(1, round(hidden_size / _HEAD_DIM))
    return {
        "model": {
            "vocab_size": _VOCAB_SIZE,
            "seq_len": _SEQ_LEN,
            "hidden_size": num_heads * _HEAD_DIM,
            "num_layers": _NUM_LAYERS,
            "num_heads": num_heads,
        },
        "batch": {"global_batch_size": 64},
        "train": {"steps": 1000},
        "optimizer": {"lr": 1e-3},
        "runtime": {"device": "cpu", "threads": 1},
    }


def build_state(config: Config, mesh: Mesh, bucket_size: int) -> RankState:
    """Return this data-parallel rank's shards. Another `bucket_size` cuts the same state at other places."""
    (meta,) = build_meta_chunks(config, mesh.layout, mesh.tp, rank=mesh.rank)
    shards: list[SavedShard] = []
    flats: list[Tensor] = []
    for members in group_into_buckets(meta.parameters, bucket_size):
        bucket = Bucket(
            members, mesh.by_name, dtype=torch.float32, gradient_dtype=torch.float32, device=torch.device("meta")
        )
        for kind in KINDS:
            flat = torch.zeros(bucket.shard_numel)
            shards += [SavedShard(kind, shard) for shard in bucket.flat_shards(flat)]
            flats.append(flat)
    state = RankState(tuple(shards), tuple(flats))
    state.fill()
    return state


def _values(kind: str, shard: FlatShard) -> Tensor:
    """Return the values of a box: numbers computed from each element's place in the whole parameter.

    A box is contiguous.
    """
    first = 0
    for size, offset in zip(shard.global_shape, shard.box.offsets, strict=True):
        first = first * size + offset
    places = torch.arange(first, first + shard.box.numel, dtype=torch.int64)
    salt = KINDS.index(kind) + len(KINDS) * sum(shard.name.encode())
    return places.mul_(_SEED).add_(salt).remainder_(_PERIOD).to(torch.float32).view(shard.box.sizes)
