"""The files that describe a checkpoint: the index, and `.metadata`, with which unmodified torch reads the directory.

The classes in `.metadata` are torch's, some of them private names of torch.distributed.checkpoint. Only this file
builds them, and only metadata_unpickler.py reads them.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatrain.arena.directory import Arena
from megatrain.checkpoint.data_file import content_digest, data_file_name
from megatrain.checkpoint.gathered_items import stored_by_ranks
from megatrain.checkpoint.image import ItemsJson
from megatrain.checkpoint.index_file import CheckpointIndex
from megatrain.checkpoint.stored_tensors import StoredTensor, StoredTensors
from megatrain.contracts.checkpoint_files import INDEX_NAME, METADATA_NAME
from megatrain.contracts.errors import CheckpointError

_PICKLE_PROTOCOL = 4


def describing_files(stored: StoredTensors) -> dict[str, bytes]:
    """Return the content of `.metadata` and of the index, by name, for a checkpoint that holds only tensors.

    Raises: CheckpointError naming a tensor whose dtype torch does not have.
    """
    metadata = metadata_bytes(stored)
    return {METADATA_NAME: metadata, INDEX_NAME: CheckpointIndex(content_digest(metadata), stored).encode()}


def publish_description(arena: Arena, round_number: int, items_by_rank: Mapping[int, ItemsJson]) -> int:
    """Put the files that describe the checkpoints of a round into the arena of the host of rank 0.

    Returns their total size in bytes.
    Raises: CheckpointError naming a tensor that is incomplete, or of which two ranks hold the same element.
    """
    stored = stored_by_ranks(items_by_rank, lambda rank: data_file_name(round_number, rank))
    described = describing_files(stored)
    arena.metadata(round_number).write_bytes(described[METADATA_NAME])
    arena.index(round_number).write_bytes(described[INDEX_NAME])
    return sum(map(len, described.values()))


def metadata_bytes(stored: StoredTensors) -> bytes:
    """Return the content of `.metadata`. Raises: as `describing_files`."""
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    # pickle writes a repeated object once: this halves the sizes and offsets, in memory and in the file
    sizes: dict[tuple[int, ...], torch.Size] = {}
    for key, tensor in stored.tensors.items():
        indexes = [MetadataIndex(key, item.offsets, number) for number, item in enumerate(tensor.items)]
        tensors[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=_dtype_of(tensor)),
            size=torch.Size(tensor.shape),
            chunks=[
                ChunkStorageMetadata(index.offset, sizes.setdefault(item.sizes, torch.Size(item.sizes)))
                for index, item in zip(indexes, tensor.items, strict=True)
            ],
        )
        for index, item in zip(indexes, tensor.items, strict=True):
            storage[index] = _StorageInfo(item.file, item.offset, item.length)
    metadata = Metadata(
        state_dict_metadata=dict(tensors),
        # describes how a nested state dict was flattened; here keys stay as they are
        planner_data={key: (key,) for key in tensors},
        storage_data=storage,
        version=CURRENT_DCP_VERSION,
    )
    return pickle.dumps(metadata, protocol=_PICKLE_PROTOCOL)


def _dtype_of(tensor: StoredTensor) -> torch.dtype:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{tensor.key} has dtype {tensor.dtype!r}, which torch does not have")
    return dtype
