"""Reads items of a checkpoint from storage, each checked against the digest that its file has for it.

Files that another program wrote have no list of items: then what is read is checked by its form alone. The one place
that makes a tensor of an item's bytes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

import torch
from torch import Tensor

from megatrain.checkpoint.data_file import check_item, content_digest
from megatrain.checkpoint.envelope import envelope
from megatrain.checkpoint.item_digests import ItemDigests
from megatrain.checkpoint.metadata_reader import StoredItem
from megatrain.contracts.checkpoint_files import METADATA_NAME
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.location import Location
from megatrain.contracts.manifest import FileEntry, Manifest


class ItemReader:
    """Reads the items of one checkpoint directory. For one thread at a time."""

    def __init__(self, directory: Location, files: Mapping[str, FileEntry]) -> None:
        self.directory = directory
        self.num_items = 0
        self._digests = ItemDigests(directory, files)
        self._item_bytes = 0

    @property
    def bytes_read(self) -> int:
        """Bytes of items and lists of items read from storage so far."""
        return self._item_bytes + self._digests.bytes_read

    def read(self, item: StoredItem) -> bytes:
        """Return an item's bytes.

        Raises: CheckpointError naming the file and the item.
        """
        place = self.directory / item.file
        content = place.read_range(item.offset, item.length)
        self._item_bytes += item.length
        self.num_items += 1
        expected = self._digests.find(item)
        if expected is not None:
            check_item(content, expected, str(place))
        return content


def metadata_content(directory: Location, manifest: Manifest) -> bytes:
    """Return the metadata, which are those that the manifest vouches for.

    Raises: CheckpointError naming the file.
    """
    return vouched_content(directory, manifest, manifest.name_of(METADATA_NAME))


def vouched_content(directory: Location, manifest: Manifest, name: str) -> bytes:
    """Return the bytes of a file that holds no items, which are those that the manifest vouches for.

    Raises: CheckpointError naming the file.
    """
    place = directory / name
    content = place.read()
    entry = manifest.files.get(name)
    if entry is None or entry.digest != content_digest(content):
        raise CheckpointError(f"{place}: is not the file that the manifest vouches for; it is damaged")
    return content


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that metadata_reader knows by `name`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def tensor_of(content: Tensor, item: StoredItem, dtype: torch.dtype) -> Tensor:
    """Return the tensor in an archive: where it lies when the archive is one of ours, else as torch.load finds it.

    Shapes: content, uint8 [item.length]; result item.sizes.
    Raises: CheckpointError, RuntimeError or ValueError when there is no such tensor in it.
    """
    around = envelope(item.sizes, dtype)
    is_ours = content.numel() == around.num_bytes and (content[: around.data_offset].numpy().tobytes() == around.prefix)
    if is_ours:
        data = content[around.data_offset : around.data_offset + around.num_data_bytes]
        return data.view(dtype).view(item.sizes)
    loaded = torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)
    if not isinstance(loaded, Tensor) or tuple(loaded.shape) != item.sizes:
        raise CheckpointError(f"found {type(loaded).__name__} {tuple(getattr(loaded, 'shape', ()))}")
    return loaded
