"""The `.metadata` of a checkpoint directory, written by torch's own classes so that stock torch reads the directory.

It says for each tensor which boxes exist and in which file, where, each lies. The classes are partly underscore names
of torch.distributed.checkpoint: this file is the only one that builds them. Nothing of ours unpickles what it writes.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatrain.checkpoint.box_cover import first_gap, first_overlap, region_text
from megatrain.checkpoint.image import ItemsJson
from megatrain.contracts.errors import CheckpointError
from megatrain.parallel.boxes import Box

_PICKLE_PROTOCOL = 4


@dataclass(frozen=True, slots=True)
class _Stored:
    """One item, and the rank in whose file it is."""

    rank: int
    global_shape: tuple[int, ...]
    box: Box
    dtype: str
    offset: int
    length: int


def metadata_bytes(items_by_rank: Mapping[int, ItemsJson], file_name_of: Callable[[int], str]) -> bytes:
    """Return the content of `.metadata` for data files that hold each rank's items.

    Raises: CheckpointError naming the tensor when ranks disagree in its shape or dtype, when two items share an element
    (somebody owns each once) or when an element is in none.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for key, stored in _by_key(items_by_rank).items():
        _check(key, stored)
        tensors[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=_dtype_of(key, stored[0].dtype)),
            size=torch.Size(stored[0].global_shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(one.box.offsets), sizes=torch.Size(one.box.sizes))
                for one in stored
            ],
        )
        for number, one in enumerate(stored):
            index = MetadataIndex(key, one.box.offsets, number)
            storage[index] = _StorageInfo(file_name_of(one.rank), one.offset, one.length)
    metadata = Metadata(
        state_dict_metadata=dict(tensors),
        # how a nested state dict was flattened: keys stay as they are
        planner_data={key: (key,) for key in tensors},
        storage_data=storage,
        version=CURRENT_DCP_VERSION,
    )
    return pickle.dumps(metadata, protocol=_PICKLE_PROTOCOL)


def _by_key(items_by_rank: Mapping[int, ItemsJson]) -> dict[str, list[_Stored]]:
    """Collect the items of each tensor, tensors by name and items by offsets: independent of who holds what."""
    by_key: dict[str, list[_Stored]] = defaultdict(list)
    for rank, items in items_by_rank.items():
        for key, global_shape, offsets, sizes, dtype, offset, length in items:
            box = Box(tuple(offsets), tuple(sizes))
            by_key[key].append(_Stored(rank, tuple(global_shape), box, dtype, offset, length))
    return {key: sorted(by_key[key], key=lambda one: (one.box.offsets, one.rank)) for key in sorted(by_key)}


def _check(key: str, stored: Sequence[_Stored]) -> None:
    first = stored[0]
    for one in stored:
        if (one.global_shape, one.dtype) != (first.global_shape, first.dtype):
            raise CheckpointError(
                f"{key} is {first.dtype} of shape {first.global_shape} on rank {first.rank} but {one.dtype} of shape "
                f"{one.global_shape} on rank {one.rank}; all ranks must run the same configuration"
            )
    boxes = [one.box for one in stored]
    overlap = first_overlap(boxes)
    if overlap is not None:
        one, other = (stored[number] for number in overlap)
        raise CheckpointError(
            f"{key}{region_text(one.box)} of rank {one.rank} and {region_text(other.box)} of rank {other.rank} "
            f"overlap; each element is saved by one rank alone"
        )
    gap = first_gap(Box((0,) * len(first.global_shape), first.global_shape), boxes)
    if gap is not None:
        raise CheckpointError(f"{key}{region_text(gap)} is saved by no rank; each element is saved by one rank")


def _dtype_of(key: str, name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{key} has dtype {name!r}, which torch does not have")
    return dtype
