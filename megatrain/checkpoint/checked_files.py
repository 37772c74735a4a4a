"""Reads the index and other small files of a checkpoint, checked against their digests, and the digests of the items.

COMMIT has the digest of the manifest, and the manifest has the digest of every file that it lists. So every change of
such a file is detected. The digests of items are in the trailers of the data files. verification.py reads the items,
too. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatrain.checkpoint_format.checkpoint_names import INDEX_NAME, METADATA_NAME
from megatrain.checkpoint_format.data_file import TrailerItem, content_digest, is_data_file, read_trailer
from megatrain.checkpoint_format.index_file import CheckpointIndex
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import FileEntry, Manifest
from megatrain.checkpoint_format.stored_tensors import StoredItem, StoredTensors, size_problem
from megatrain.contracts.errors import CheckpointError


def checked_content(directory: Location, manifest: Manifest, name: str) -> bytes:
    """Return the bytes of a file that holds no items, after a check against the manifest's digest.

    Raises: CheckpointError naming the file.
    """
    location = directory / name
    content = location.read()
    entry = manifest.files.get(name)
    if entry is None or entry.digest != content_digest(content):
        raise CheckpointError(f"{location}: differs from its entry in the manifest; it is damaged")
    return content


def checked_index(directory: Location, manifest: Manifest) -> bytes:
    """Return the bytes of the index. Raises: CheckpointError naming the file."""
    location = directory / manifest.name_of(INDEX_NAME)
    problem = size_problem(location.size() or 0)
    if problem is not None:
        raise CheckpointError(f"{location}: {problem}; it is damaged or forged")
    return checked_content(directory, manifest, location.name)


def read_index(content: bytes, directory: Location, manifest: Manifest) -> StoredTensors:
    """Parse the index of a checkpoint.

    Raises: CheckpointError naming the file.
    """
    location = directory / manifest.name_of(INDEX_NAME)
    index = CheckpointIndex.decode(content, str(location))
    metadata = manifest.files.get(manifest.name_of(METADATA_NAME))
    if metadata is None or index.metadata_digest != metadata.digest:
        raise CheckpointError(
            f"{location}: its digest of {METADATA_NAME} is not the manifest's, so it belongs to another checkpoint"
        )
    return index.stored


def find_stored(directory: Location, manifest: Manifest) -> StoredTensors:
    """Return the content of a checkpoint. Raises: CheckpointError naming the file."""
    return read_index(checked_index(directory, manifest), directory, manifest)


@dataclass(slots=True)
class ItemDigests:
    """Looks up the digests of items of one checkpoint directory. Each file's trailer is read once."""

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
            self._items[item.file] = {trailer_item.offset: trailer_item for trailer_item in trailer.items}
        found = self._items[item.file].get(item.offset)
        if found is None:
            raise CheckpointError(f"{location}: no item begins at byte {item.offset}, but {INDEX_NAME} lists one there")
        return found
