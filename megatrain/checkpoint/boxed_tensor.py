"""A logical tensor of which this rank holds some axis-aligned boxes, as torch's distributed checkpoint sees it.

Flat optimizer shards are boxes (megatrain.parallel.sharding), so one format serves every layout: a rank writes the
boxes it owns, and reads the boxes it needs whatever the boxes were that were written. Nothing is gathered.
Source: torch's `_Checkpointable` protocol, an underscore interface: this file is the only one that knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatrain.parallel.sharding import FlatShard


class BoxedTensor(Tensor):
    """A tensor of the whole shape without memory of its own; its boxes have it. Only the checkpoint may use it."""

    shards: dict[tuple[int, ...], FlatShard]

    @staticmethod
    def __new__(cls: type[BoxedTensor], shards: Sequence[FlatShard]) -> BoxedTensor:
        first = shards[0]
        self: BoxedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, first.global_shape, dtype=first.tensor.dtype, device=first.tensor.device
        )
        self.shards = {shard.box.offsets: shard for shard in shards}
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} on a BoxedTensor: it can be saved and loaded, nothing else")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BoxedTensor({tuple(self.shape)}, {len(self.shards)} boxes)"

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(shard),
                    properties=TensorProperties.create_from_tensor(shard.tensor),
                    size=self.shape,
                ),
            )
            for offsets, shard in self.shards.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(shard) for shard in self.shards.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.shards[tuple(index.offset)].tensor


def _chunk(shard: FlatShard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(shard.box.offsets), sizes=torch.Size(shard.box.sizes))
