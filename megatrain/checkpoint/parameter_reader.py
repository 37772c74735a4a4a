"""Read boxes and whole parameters of a checkpoint of any layout in one process, assembled from its items.

The reader keeps the items that it read last, up to a limit of memory, because callers mostly request boxes in storage
order, and neighboring boxes share items. It assembles only the requested boxes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor

from megatrain.checkpoint.checked_files import checked_index, read_index
from megatrain.checkpoint.image import MAX_ITEM_BYTES, key_of
from megatrain.checkpoint.item_reader import ItemReader, tensor_of, torch_dtype
from megatrain.checkpoint.load_plan import ItemCatalog, ItemRead, WantedBox, plan_load
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import Manifest
from megatrain.checkpoint_format.stored_tensors import EMA, MASTER, StoredItem, StoredTensor
from megatrain.contracts.errors import CheckpointError
from megatrain.parallel.boxes import Box

NUM_KEPT_ITEMS = 16
"""A box needs this many items at once when the checkpoint's files are of 16 tensor-parallel ranks."""
_ENVELOPE_BYTES = 4096
"""An upper bound for the bytes around an item's data."""


def bytes_of_kept_items(max_item_bytes: int) -> int:
    """Return the memory for the items that a box may need, with at most `max_item_bytes` of data each."""
    return NUM_KEPT_ITEMS * (max_item_bytes + _ENVELOPE_BYTES)


class ParameterReader:
    """Reads from one committed checkpoint. It checks every item against its digest."""

    def __init__(
        self, directory: Location, manifest: Manifest, kept_bytes: int = bytes_of_kept_items(MAX_ITEM_BYTES)
    ) -> None:
        """Read the checkpoint's index. kept_bytes: the memory for items to keep; the last one is always kept.

        Raises: CheckpointError naming the file.
        """
        stored = read_index(checked_index(directory, manifest), directory, manifest)
        self.tensors: Mapping[str, StoredTensor] = stored.tensors
        self.files = stored.files()
        self._catalog = ItemCatalog(self.tensors, str(directory), manifest.file_name)
        self._items = ItemReader(directory, manifest.files)
        self._max_kept_bytes = kept_bytes
        self._recent: OrderedDict[int, Tensor] = OrderedDict()
        self._kept_bytes = 0

    @property
    def bytes_read(self) -> int:
        """Bytes read from storage so far, without the index."""
        return self._items.bytes_read

    def is_kept(self, number: int) -> bool:
        """Return whether an item is in memory."""
        return number in self._recent

    def needed_items(self, key: str, global_shape: tuple[int, ...], box: Box) -> dict[int, StoredItem]:
        """Return the items, by number, that a box of a tensor needs.

        Raises: CheckpointError naming the tensor.
        """
        return {read.number: read.item for read in plan_load([WantedBox(key, global_shape, box)], self._catalog)}

    def read_parameter(self, name: str, kind: str = MASTER) -> Tensor:
        """Return a parameter's whole master weights, or their moving average (EMA).

        Raises: CheckpointError naming the tensor or the file, or when the checkpoint has no average.
        """
        key = key_of(kind, name)
        if kind == EMA and key not in self.tensors:
            raise CheckpointError(
                f"{self._catalog.location} holds no average of the weights ({key}): its job had optimizer.ema_decay=0;"
                " leave out --ema"
            )
        shape = self._catalog.tensor(key).shape
        return self.read_box(key, shape, Box((0,) * len(shape), shape))

    def read_box(self, key: str, global_shape: tuple[int, ...], box: Box) -> Tensor:
        """Return one box of a tensor. Do not change the result: it may be a kept item that a later read returns again.

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

    def _read(self, read: ItemRead) -> Tensor:
        if read.number in self._recent:
            self._recent.move_to_end(read.number)
            return self._recent[read.number]
        while self._recent and self._kept_bytes + read.item.length > self._max_kept_bytes:
            self._kept_bytes -= self._recent.popitem(last=False)[1].untyped_storage().nbytes()
        content = torch.frombuffer(self._items.read(read.item), dtype=torch.uint8)
        dtype = torch_dtype(self.tensors[read.key].dtype)
        tensor = tensor_of(content, self._items.directory, read.key, read.item, dtype)
        self._recent[read.number] = tensor
        self._kept_bytes += tensor.untyped_storage().nbytes()
        return tensor
