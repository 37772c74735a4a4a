"""The files that describe a checkpoint: the index, and `.metadata`, with which unmodified torch reads the directory.

`.metadata` is a pickle of classes of torch.distributed.checkpoint, some of them private. This file refers to them by
name, because importing them takes about as much processor time at each rank's start as importing torch itself. Only
torch reads `.metadata`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from megatrain.arena.directory import Arena
from megatrain.checkpoint.gathered_items import stored_by_ranks
from megatrain.checkpoint.image import ItemsJson
from megatrain.checkpoint.named_pickle import Call, Items, Name, New, Value, pickled
from megatrain.checkpoint_format.checkpoint_names import INDEX_NAME, METADATA_NAME
from megatrain.checkpoint_format.data_file import content_digest, data_file_name
from megatrain.checkpoint_format.index_file import CheckpointIndex
from megatrain.checkpoint_format.stored_tensors import StoredTensor, StoredTensors
from megatrain.contracts.errors import CheckpointError

# torch.distributed.checkpoint.filesystem.CURRENT_DCP_VERSION of torch 2.11 to 2.13
_VERSION = "1.0.0"
_METADATA = "torch.distributed.checkpoint.metadata"
_SIZE = Name("torch", "Size")
# the layout, the memory format (0: contiguous) and the two flags between are deprecated, and always the same
_LAYOUT = Call(Name("torch.serialization", "_get_layout"), "torch.strided")
_MEMORY_FORMAT = Call(Name(_METADATA, "_MEM_FORMAT_ENCODING"), 0)


def describing_files(stored: StoredTensors) -> dict[str, bytes]:
    """Return the content of `.metadata` and of the index, by name, for a checkpoint that holds only tensors.

    Raises: CheckpointError naming a tensor whose dtype torch does not have.
    """
    metadata = metadata_bytes(stored)
    return {METADATA_NAME: metadata, INDEX_NAME: CheckpointIndex(content_digest(metadata), stored).encode()}


def publish_description(arena: Arena, round_number: int, items_by_rank: Mapping[int, ItemsJson]) -> int:
    """Put the files that describe the checkpoints of a round into the arena of the host of rank 0.

    Returns their total size in bytes.
    Raises: CheckpointError naming the tensor, as `stored_by_ranks` and `describing_files`.
    """
    stored = stored_by_ranks(items_by_rank, lambda rank: data_file_name(round_number, rank))
    described = describing_files(stored)
    arena.metadata(round_number).write_bytes(described[METADATA_NAME])
    arena.index(round_number).write_bytes(described[INDEX_NAME])
    return sum(map(len, described.values()))


def metadata_bytes(stored: StoredTensors) -> bytes:
    """Return the content of `.metadata`. Raises: as `describing_files`."""
    tensors = stored.tensors
    return pickled(
        _metadata(
            "Metadata",
            state_dict_metadata={key: _tensor(tensor) for key, tensor in tensors.items()},
            # describes how a nested state dict was flattened; here keys stay as they are
            planner_data={key: (key,) for key in tensors},
            storage_data=Items(_storage_entries(stored)),
            storage_meta=None,
            version=_VERSION,
        )
    )


def _metadata(name: str, **fields: Value) -> New:
    return New(Name(_METADATA, name), fields)


def _tensor(tensor: StoredTensor) -> New:
    state = (_dtype_of(tensor), _LAYOUT, False, _MEMORY_FORMAT, False)
    return _metadata(
        "TensorStorageMetadata",
        properties=New(Name(_METADATA, "TensorProperties"), state),
        size=Call(_SIZE, tensor.shape),
        chunks=[
            _metadata("ChunkStorageMetadata", offsets=Call(_SIZE, item.offsets), sizes=Call(_SIZE, item.sizes))
            for item in tensor.items
        ],
    )


def _storage_entries(stored: StoredTensors) -> Iterator[tuple[New, New]]:
    """Yield a MetadataIndex and its _StorageInfo for each item of each tensor."""
    info = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    for key, tensor in stored.tensors.items():
        for number, item in enumerate(tensor.items):
            index = _metadata("MetadataIndex", fqn=key, offset=Call(_SIZE, item.offsets), index=number)
            yield index, New(info, {"relative_path": item.file, "offset": item.offset, "length": item.length})


def _dtype_of(tensor: StoredTensor) -> Name:
    if not isinstance(getattr(torch, tensor.dtype, None), torch.dtype):
        raise CheckpointError(f"{tensor.key} has dtype {tensor.dtype!r}, which torch does not have")
    return Name("torch", tensor.dtype)
