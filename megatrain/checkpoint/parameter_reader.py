"""Boxes and whole parameters of a checkpoint of any layout, assembled from its items in one process.

What was read last is kept, up to some items' worth of memory: boxes are mostly asked for in the order in which they
lie, and neighbours share items. Nothing is gathered that was not asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor

from megatrain.checkpoint.image import MAX_ITEM_BYTES, key_of
from megatrain.checkpoint.item_reader import ItemReader, metadata_content, tensor_of, torch_dtype
from megatrain.checkpoint.load_plan import ItemCatalog, ItemRead, WantedBox, plan_load
from megatrain.checkpoint.metadata_reader import StoredItem, StoredTensor, read_metadata
from megatrain.contracts.checkpoint_files import METADATA_NAME
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.location import Location
from megatrain.contracts.manifest import Manifest
from megatrain.parallel.boxes import Box

NUM_KEPT_ITEMS = 16
"""What a box needs at once when the files are of so many tensor-parallel ranks."""
_ENVELOPE_BYTES = 4096
"""More than there is around the data of an item."""


def bytes_of_kept_items(max_item_bytes: int) -> int:
    """Return the memory for as many items as a box may need, of which each has at most so many bytes of data."""
    return NUM_KEPT_ITEMS * (max_item_bytes + _ENVELOPE_BYTES)


class ParameterReader:
    """Reads from one committed checkpoint. Every item that is read is checked against its digest."""

    def __init__(
        self, directory: Location, manifest: Manifest, kept_bytes: int = bytes_of_kept_items(MAX_ITEM_BYTES)
    ) -> None:
        """Read what the checkpoint holds. kept_bytes: the memory for items that were read; the last one is always kept.

        Raises: CheckpointError naming the file.
        """
        place = str(directory / manifest.name_of(METADATA_NAME))
        self.tensors: Mapping[str, StoredTensor] = read_metadata(metadata_content(directory, manifest), place).tensors
        self._catalog = ItemCatalog(self.tensors, str(directory))
        self._items = ItemReader(directory, manifest.files)
        self._most_kept_bytes = kept_bytes
        self._recent: OrderedDict[int, Tensor] = OrderedDict()
        self._kept_bytes = 0

    @property
    def bytes_read(self) -> int:
        """Bytes read from storage so far, without the metadata."""
        return self._items.bytes_read

    def is_kept(self, number: int) -> bool:
        """Say whether an item is in memory."""
        return number in self._recent

    def needed_items(self, key: str, global_shape: tuple[int, ...], box: Box) -> dict[int, StoredItem]:
        """Return the items, by number, from which a box of a tensor is made.

        Raises: CheckpointError naming the tensor.
        """
        return {read.number: read.item for read in plan_load([WantedBox(key, global_shape, box)], self._catalog)}

    def read_parameter(self, name: str) -> Tensor:
        """Return a parameter's master weights, whole.

        Raises: CheckpointError naming the tensor or the file.
        """
        key = key_of("master", name)
        shape = self._stored(key).shape
        return self.read_box(key, shape, Box((0,) * len(shape), shape))

    def read_box(self, key: str, global_shape: tuple[int, ...], box: Box) -> Tensor:
        """Return one box of a tensor. The result may be memory that is read again: it is not to be changed.

        Shapes: result box.sizes.
        Raises: CheckpointError naming the tensor or the file.
        """
        reads = plan_load([WantedBox(key, global_shape, box)], self._catalog)
        if len(reads) == 1 and (reads[0].item.offsets, reads[0].item.sizes) == (box.offsets, box.sizes):
            return self._read(reads[0])
        result = torch.empty(box.sizes, dtype=torch_dtype(self.tensors[key].dtype))
        for read in reads:
            tensor = self._read(read)
            for copy in read.copies:
                result[copy.target].copy_(tensor[copy.source])
        return result

    def _stored(self, key: str) -> StoredTensor:
        stored = self.tensors.get(key)
        if stored is None:
            raise CheckpointError(
                f"{self._catalog.place} holds no tensor {key}; its model is not this configuration's: compare its"
                " manifest.json"
            )
        return stored

    def _read(self, read: ItemRead) -> Tensor:
        if read.number in self._recent:
            self._recent.move_to_end(read.number)
            return self._recent[read.number]
        while self._recent and self._kept_bytes + read.item.length > self._most_kept_bytes:
            self._kept_bytes -= self._recent.popitem(last=False)[1].untyped_storage().nbytes()
        content = torch.frombuffer(bytearray(self._items.read(read.item)), dtype=torch.uint8)
        try:
            tensor = tensor_of(content, read.item, torch_dtype(self.tensors[read.key].dtype))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{self._items.directory / read.item.file}: {read.key} at byte {read.item.offset} is no tensor of"
                f" {read.item.sizes}: {error}"
            ) from error
        self._recent[read.number] = tensor
        self._kept_bytes += tensor.untyped_storage().nbytes()
        return tensor
