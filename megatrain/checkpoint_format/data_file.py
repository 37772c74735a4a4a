"""A data file of a checkpoint: an image of items, then a trailer with the range and the digest of each item.

    image    items, each at a multiple of 64, zeros between
    trailer  JSON {"schema_version": 1, "items": [[offset, length, "<SHA-256>"], ...]}
    footer   24 bytes: magic b"MTITEMS1", u64 length of the JSON, u32 its CRC-32, u32 0

The manifest holds the digest of the JSON. So a reader of a few items verifies only those, and a writer hashes the
bytes once while it writes them. image.py makes the items; index_file.py describes what they contain.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass

from megatrain.checkpoint_format.item_ranges import item_ranges_problem
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import FileEntry
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.files.json_object import JsonObject

TRAILER_SCHEMA_VERSION = 1
FOOTER_MAGIC = b"MTITEMS1"
_FOOTER = struct.Struct("<8sQII")
_TAIL_BYTES = 64 * 2**10
"""Size of the first read, from the end of a file: the trailer of about 700 items, so usually the whole trailer."""
_BLOCK_BYTES = 8 * 2**20
"""Size of each read while a whole file is verified."""
_WHOLE_DIGEST = "sha256:"
_ITEMS_DIGEST = "items-sha256:"
_DATA_FILE_NAME = re.compile(r"r[0-9]{6,}-rank-[0-9]{5,}\.distcp")
_DIGEST_CHARACTERS = 64
_HEX_DIGEST = re.compile(f"[0-9a-f]{{{_DIGEST_CHARACTERS}}}")

Bytes = bytes | bytearray | memoryview


def data_file_name(round_number: int, number: int) -> str:
    """Return the name of rank `number`'s data file. It contains the round, so no older round writes to this file."""
    return f"r{round_number:06d}-rank-{number:05d}.distcp"


def is_data_file_name(name: str) -> bool:
    """Return whether a file name has the form of a data file's name."""
    return _DATA_FILE_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class TrailerItem:
    """Range and SHA-256 of one item."""

    offset: int
    length: int
    digest: str


@dataclass(frozen=True, slots=True)
class Trailer:
    """A data file's list of its items. `digest` is the file's digest in the manifest."""

    items: tuple[TrailerItem, ...]
    image_bytes: int
    digest: str


def content_digest(content: Bytes) -> str:
    """Return the digest that the manifest has for a file that is not a data file."""
    return _WHOLE_DIGEST + hashlib.sha256(content).hexdigest()


def encode_trailer(items: Sequence[TrailerItem]) -> bytes:
    """Return the bytes that follow the image in a data file."""
    listed = [[item.offset, item.length, item.digest] for item in items]
    text = json.dumps({"schema_version": TRAILER_SCHEMA_VERSION, "items": listed}, separators=(",", ":")).encode()
    return text + _FOOTER.pack(FOOTER_MAGIC, len(text), zlib.crc32(text), 0)


def data_file_bytes(image_bytes: int, items: Sequence[tuple[int, int]]) -> int:
    """Return the size of the data file of an image, given the offset and length of each item."""
    return image_bytes + len(encode_trailer([TrailerItem(*item, "0" * _DIGEST_CHARACTERS) for item in items]))


def trailer_digest(encoded: bytes) -> str:
    """Return the digest that the manifest has for the data file that ends with `encoded` (from encode_trailer)."""
    return _text_digest(encoded[: -_FOOTER.size])


def _text_digest(text: Bytes) -> str:
    return _ITEMS_DIGEST + hashlib.sha256(text).hexdigest()


def is_data_file(entry: FileEntry) -> bool:
    """Return whether a file of a manifest ends with a list of its items."""
    return entry.digest.startswith(_ITEMS_DIGEST)


def read_trailer(location: Location, size: int, digest: str | None = None) -> Trailer:
    """Return the trailer of a data file of `size` bytes. When `digest` is given, from the manifest, it must match.

    Raises: CheckpointError naming the file.
    """
    name = str(location)
    if size < _FOOTER.size:
        raise CheckpointError(f"{name}: {size} bytes, and a data file has at least {_FOOTER.size}; the file is damaged")
    tail = location.read_range(size - min(size, _TAIL_BYTES), min(size, _TAIL_BYTES))
    magic, text_bytes, crc, zero = _FOOTER.unpack_from(tail, len(tail) - _FOOTER.size)
    image_bytes = size - _FOOTER.size - text_bytes
    if magic != FOOTER_MAGIC or zero or image_bytes < 0:
        raise CheckpointError(f"{name}: does not end with the footer of a data file; it is damaged or not a data file")
    if text_bytes + _FOOTER.size <= len(tail):
        text = tail[len(tail) - _FOOTER.size - text_bytes : -_FOOTER.size]
    else:
        text = location.read_range(image_bytes, text_bytes)
    if zlib.crc32(text) != crc:
        raise CheckpointError(
            f"{name}: the list of items at byte {image_bytes} has CRC-32 {zlib.crc32(text):#010x}, expected"
            f" {crc:#010x}; the file is damaged"
        )
    if digest not in (None, _text_digest(text)):
        raise CheckpointError(
            f"{name}: its list of items has digest {_text_digest(text)}, and the manifest has {digest}; the file is"
            " damaged, or it is not the file that the manifest describes"
        )
    items = _TrailerObject.parse(text, name, TRAILER_SCHEMA_VERSION, "the file is damaged").items(image_bytes)
    return Trailer(items, image_bytes, _text_digest(text))


class _TrailerObject(JsonObject):
    """The JSON of a trailer."""

    def items(self, image_bytes: int) -> tuple[TrailerItem, ...]:
        listed = self._raw.get("items")
        if not isinstance(listed, list) or set(self) != {"schema_version", "items"}:
            raise CheckpointError(
                f"{self._location}: the list of items must have 'items' as its only field; the file is damaged"
            )
        for entry in listed:
            is_item = isinstance(entry, list) and [type(value) for value in entry] == [int, int, str]
            if not is_item or not _HEX_DIGEST.fullmatch(entry[2]):
                raise CheckpointError(
                    f"{self._location}: an entry of the list of items is not [offset, length, SHA-256];"
                    " the file is damaged"
                )
        items = tuple(TrailerItem(*entry) for entry in listed)
        problem = item_ranges_problem([(item.offset, item.length) for item in items], image_bytes)
        if problem is not None:
            raise CheckpointError(f"{self._location}: the list of items has {problem}; the file is damaged")
        return items


class ItemHasher:
    """Computes the digests of an image's items from its bytes, passed in order in pieces of any size. Copies nothing.

    `location` names the image in errors. Raises: CheckpointError when the ranges break the rules of item_ranges.py.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], image_bytes: int, location: str) -> None:
        problem = item_ranges_problem(ranges, image_bytes)
        if problem is not None:
            raise CheckpointError(f"{location}: {problem}")
        self._ranges = ranges
        self._image_bytes = image_bytes
        self._location = location
        self._at = 0
        self._hash = hashlib.sha256()
        self._items: list[TrailerItem] = []
        self._dirty: list[int] = []

    @property
    def items(self) -> tuple[TrailerItem, ...]:
        """The items whose bytes have all been passed."""
        return tuple(self._items)

    @property
    def dirty_padding(self) -> tuple[int, ...]:
        """Offsets of nonzero bytes between items: the first one in each piece."""
        return tuple(self._dirty)

    def update(self, data: Bytes) -> None:
        """Hash the next bytes of the image.

        Raises: CheckpointError when the image has fewer bytes than were passed in total.
        """
        with memoryview(data) as view, view.cast("B") as rest:
            if self._at + len(rest) > self._image_bytes:
                raise CheckpointError(
                    f"{self._location}: {self._at + len(rest)} bytes of an image of {self._image_bytes}; it changed"
                    " while it was read"
                )
            start = 0
            while start < len(rest):
                start += self._take(rest[start:])

    def _take(self, data: memoryview) -> int:
        """Process bytes up to the next start or end of an item, and return how many."""
        is_last = len(self._items) == len(self._ranges)
        offset, length = (self._image_bytes, 0) if is_last else self._ranges[len(self._items)]
        if self._at < offset:
            padding = bytes(data[: offset - self._at])
            num_zeros = len(padding) - len(padding.lstrip(b"\0"))
            if num_zeros < len(padding):
                self._dirty.append(self._at + num_zeros)
            self._at += len(padding)
            return len(padding)
        piece = data[: offset + length - self._at]
        self._hash.update(piece)
        self._at += len(piece)
        if self._at == offset + length:
            self._items.append(TrailerItem(offset, length, self._hash.hexdigest()))
            self._hash = hashlib.sha256()
        return len(piece)

    def finish(self) -> tuple[TrailerItem, ...]:
        """Return all items, for the trailer.

        Raises: CheckpointError when bytes are missing, or not zero between items.
        """
        if self._at != self._image_bytes:
            raise CheckpointError(f"{self._location}: ended after {self._at} of {self._image_bytes} bytes")
        if self._dirty:
            raise CheckpointError(f"{self._location}: {_padding_problem(self._dirty[0])}")
        return self.items


def _padding_problem(offset: int) -> str:
    return f"bytes that are not zero between items, from byte {offset} on; the program that wrote the file has a bug"


def check_item(data: Bytes, item: TrailerItem, location: str) -> None:
    """Compare the bytes of an item with the trailer's length and digest. `location` names the file.

    Raises: CheckpointError.
    """
    with memoryview(data) as view:
        num_bytes = view.nbytes
    found = hashlib.sha256(data).hexdigest()
    if num_bytes != item.length or found != item.digest:
        raise CheckpointError(f"{location}: {_item_problem(item, f'{num_bytes} bytes with SHA-256 {found}')}")


def _item_problem(item: TrailerItem, found: str) -> str:
    return (
        f"the item at byte {item.offset} is {found}, expected {item.length} bytes with SHA-256 {item.digest}; the file"
        " is damaged"
    )


def verify_file(location: Location, entry: FileEntry, is_cancelled: Callable[[], bool] = lambda: False) -> list[str]:
    """Read a whole file of the manifest and return its problems. Each names the file, and for an item also the byte.

    Raises: CancelledError once the caller has cancelled, checked before each block.
    """
    verify = _verify_data_file if is_data_file(entry) else _verify_whole_file
    try:
        size = location.size()
        if size == entry.size:
            return verify(location, entry, is_cancelled)
    except CheckpointError as error:
        return [str(error)]
    found = "missing" if size is None else f"{size} bytes"
    return [f"{location}: {found}, expected {entry.size} bytes; it was removed, cut short or replaced"]


def _verify_data_file(location: Location, entry: FileEntry, is_cancelled: Callable[[], bool]) -> list[str]:
    trailer = read_trailer(location, entry.size, entry.digest)
    hasher = ItemHasher([(item.offset, item.length) for item in trailer.items], trailer.image_bytes, str(location))
    for block in _blocks(location, trailer.image_bytes, is_cancelled):
        hasher.update(block)
    damaged = [
        f"{location}: {_item_problem(item, f'{found.length} bytes with SHA-256 {found.digest}')}"
        for item, found in zip(trailer.items, hasher.items, strict=True)
        if item != found
    ]
    return damaged + [f"{location}: {_padding_problem(offset)}" for offset in hasher.dirty_padding]


def _verify_whole_file(location: Location, entry: FileEntry, is_cancelled: Callable[[], bool]) -> list[str]:
    found = hashlib.sha256()
    for block in _blocks(location, entry.size, is_cancelled):
        found.update(block)
    if _WHOLE_DIGEST + found.hexdigest() == entry.digest:
        return []
    return [f"{location}: {_WHOLE_DIGEST}{found.hexdigest()}, and the manifest has {entry.digest}; the file is damaged"]


def _blocks(location: Location, num_bytes: int, is_cancelled: Callable[[], bool]) -> Iterator[Bytes]:
    for start in range(0, num_bytes, _BLOCK_BYTES):
        if is_cancelled():
            raise CancelledError
        yield location.read_range(start, min(_BLOCK_BYTES, num_bytes - start))
