"""The digests of a checkpoint's items, from the lists that end its data files: without torch, without reading items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatrain.checkpoint.data_file import TrailerItem, is_data_file, read_trailer
from megatrain.checkpoint.metadata_reader import StoredItem
from megatrain.contracts.checkpoint_files import METADATA_NAME
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.location import Location
from megatrain.contracts.manifest import FileEntry


@dataclass(slots=True)
class ItemDigests:
    """Looks up items of one checkpoint directory; each file's list is read once."""

    directory: Location
    files: Mapping[str, FileEntry]
    bytes_read: int = 0
    _items: dict[str, dict[int, TrailerItem]] = field(default_factory=dict)

    def find(self, item: StoredItem) -> TrailerItem | None:
        """Return what the item's file says of it, None where another program wrote a file without such a list.

        Raises: CheckpointError naming the file.
        """
        place = self.directory / item.file
        entry = self.files.get(item.file)
        if entry is None:
            raise CheckpointError(f"{place}: is not in the manifest; it is another checkpoint's file")
        if not is_data_file(entry):
            return None
        if item.file not in self._items:
            trailer = read_trailer(place, entry.size, entry.digest)
            self.bytes_read += entry.size - trailer.image_bytes
            self._items[item.file] = {one.offset: one for one in trailer.items}
        found = self._items[item.file].get(item.offset)
        if found is None:
            raise CheckpointError(f"{place}: no item begins at byte {item.offset}, as {METADATA_NAME} says")
        return found
