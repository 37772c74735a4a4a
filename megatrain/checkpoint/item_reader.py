"""Reads items of a checkpoint from storage, and checks each against its digest in the file's trailer.

Files that another program wrote have no trailer; of these, only the format of the bytes is checked. This file is the
only one that makes tensors from an item's bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping

import torch
from torch import Tensor

from megatrain.checkpoint.checked_files import ItemDigests
from megatrain.checkpoint.envelope import envelope
from megatrain.checkpoint_format.data_file import check_item
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import FileEntry
from megatrain.checkpoint_format.stored_tensors import StoredItem
from megatrain.contracts.errors import CheckpointError


class ItemReader:
    """Reads the items of one checkpoint directory. For one thread at a time."""

    def __init__(self, directory: Location, files: Mapping[str, FileEntry]) -> None:
        self.directory = directory
        self.num_items = 0
        self._digests = ItemDigests(directory, files)
        self._item_bytes = 0

    @property
    def bytes_read(self) -> int:
        """Bytes of items and trailers read from storage so far."""
        return self._item_bytes + self._digests.bytes_read

    def read(self, item: StoredItem) -> bytearray:
        """Return an item's bytes.

        Raises: CheckpointError naming the file and the item.
        """
        location = self.directory / item.file
        content = location.read_range(item.offset, item.length)
        self._item_bytes += item.length
        self.num_items += 1
        expected = self._digests.find(item)
        if expected is not None:
            check_item(content, expected, str(location))
        return content


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that has this name in stored_tensors.py."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def tensor_of(content: Tensor, directory: Location, key: str, item: StoredItem, dtype: torch.dtype) -> Tensor:
    """Return the tensor in an archive: a view of its bytes if megatrain wrote the archive, else torch.load's result.

    directory, key: of the checkpoint and of the tensor, for errors.
    Shapes: content, uint8 [item.length]; result item.sizes.
    Raises: CheckpointError naming the file and the tensor, when the archive does not hold such a tensor.
    """
    try:
        around = envelope(item.sizes, dtype)
        is_own = content.numel() == around.num_bytes and (
            content[: around.data_offset].numpy().tobytes() == around.prefix
        )
        if is_own:
            data = content[around.data_offset : around.data_offset + around.num_data_bytes]
            return data.view(dtype).view(item.sizes)
        loaded = torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)
        if not isinstance(loaded, Tensor) or tuple(loaded.shape) != item.sizes:
            raise ValueError(f"found {type(loaded).__name__} {tuple(getattr(loaded, 'shape', ()))}")
    except (RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{directory / item.file}: {key} at byte {item.offset} is not a tensor of shape {item.sizes}: {error}"
        ) from error
    return loaded
