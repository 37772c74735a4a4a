"""Data files of a checkpoint, written by tests from lists of items."""

from __future__ import annotations

from megatrain.checkpoint_format.data_file import (
    ItemHasher,
    encode_trailer,
    trailer_digest,
)
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import FileEntry

FILES = ("r000002-rank-00000.distcp", "r000002-rank-00001.distcp")


def image_of(contents: list[bytes]) -> tuple[bytes, list[tuple[int, int]]]:
    """Return an image with these items, and their places."""
    image, ranges = b"", []
    for content in contents:
        ranges.append((len(image), len(content)))
        image += content + b"\0" * (-len(content) % 64)
    return image, ranges


def put_data_file(location: Location, contents: list[bytes]) -> FileEntry:
    image, ranges = image_of(contents)
    hasher = ItemHasher(ranges, len(image), "image")
    hasher.update(image)
    trailer = encode_trailer(hasher.finish())
    location.write(image + trailer)
    return FileEntry(len(image) + len(trailer), trailer_digest(trailer))
