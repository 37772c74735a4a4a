"""The digests of a checkpoint's items, from the trailers of its data files. Needs no torch and reads no items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatrain.checkpoint_format.checkpoint_files import INDEX_NAME
from megatrain.checkpoint_format.data_file import TrailerItem, is_data_file, read_trailer
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import FileEntry
from megatrain.checkpoint_format.stored_tensors import StoredItem
from megatrain.contracts.errors import CheckpointError


@dataclass(slots=True)
class ItemDigests:
    """Looks up items of one checkpoint directory. Each file's trailer is read once."""

    directory: Location
    files: Mapping[str, FileEntry]
    bytes_read: int = 0
    _items: dict[str, dict[int, TrailerItem]] = field(default_factory=dict)

    def find(self, item: StoredItem) -> TrailerItem | None:
        """Return the item's entry in its file's trailer, None when another program wrote the file without a trailer.

        Raises: CheckpointError naming the file.
        """
        location = self.directory / item.file
        entry = self.files.get(item.file)
        if entry is None:
            raise CheckpointError(f"{location}: is not in the manifest; it belongs to another checkpoint")
        if not is_data_file(entry):
            return None
        if item.file not in self._items:
            trailer = read_trailer(location, entry.size, entry.digest)
            self.bytes_read += entry.size - trailer.image_bytes
            self._items[item.file] = {one.offset: one for one in trailer.items}
        found = self._items[item.file].get(item.offset)
        if found is None:
            raise CheckpointError(f"{location}: no item begins at byte {item.offset}, but {INDEX_NAME} lists one there")
        return found
