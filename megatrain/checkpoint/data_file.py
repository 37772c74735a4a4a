"""A data file of a checkpoint: an image of items, then a trailer that tells the place and the digest of each item.

    image    items, each at a multiple of 64, zeros between
    trailer  JSON {"schema_version": 1, "items": [[offset, length, "<SHA-256>"], ...]}
    footer   24 bytes: magic b"MTITEMS1", u64 length of the JSON, u32 its CRC-32, u32 0

The manifest holds the digest of the JSON, so a reader of a few items verifies just those, and a writer hashes what it
writes once, as it goes by. How the items are made is image.py's, what is in them metadata_file.py's.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

from megatrain.checkpoint.metadata_reader import load_metadata
from megatrain.contracts.checkpoint_files import METADATA_NAME, commit_problem, manifest_place, read_manifest
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.item_ranges import item_ranges_problem
from megatrain.contracts.json_object import JsonObject
from megatrain.contracts.location import Location
from megatrain.contracts.manifest import FileEntry, Manifest

TRAILER_SCHEMA_VERSION = 1
FOOTER_MAGIC = b"MTITEMS1"
_FOOTER = struct.Struct("<8sQII")
_TAIL_BYTES = 64 * 2**10
"""Read at once from the end of a file: the trailer of some 700 items, most often all of it."""
_BLOCK_BYTES = 8 * 2**20
"""Read at once while a whole file is verified."""
_NUM_THREADS = 4
"""Files that are verified at the same time: hashing leaves the interpreter lock."""
_WHOLE_DIGEST = "sha256:"
_ITEMS_DIGEST = "items-sha256:"
_DATA_FILE_NAME = re.compile(r"r[0-9]{6,}-rank-[0-9]{5,}\.distcp")
_DIGEST_CHARACTERS = 64
_HEX_DIGEST = re.compile(f"[0-9a-f]{{{_DIGEST_CHARACTERS}}}")

Bytes = bytes | bytearray | memoryview


def data_file_name(round_number: int, number: int) -> str:
    """Return the name of the data file of rank `number`. The round keeps an older round's late writes out of it."""
    return f"r{round_number:06d}-rank-{number:05d}.distcp"


def is_data_file_name(name: str) -> bool:
    """Say whether a file is called as data files are."""
    return _DATA_FILE_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class TrailerItem:
    """Place and SHA-256 of one item."""

    offset: int
    length: int
    digest: str


@dataclass(frozen=True, slots=True)
class Trailer:
    """What a data file says of its items. `digest` is the file's in the manifest."""

    items: tuple[TrailerItem, ...]
    image_bytes: int
    digest: str


def content_digest(content: Bytes) -> str:
    """Return the manifest's digest of a file that is not a data file."""
    return _WHOLE_DIGEST + hashlib.sha256(content).hexdigest()


def encode_trailer(items: Sequence[TrailerItem]) -> bytes:
    """Return what follows the image in a data file."""
    listed = [[item.offset, item.length, item.digest] for item in items]
    text = json.dumps({"schema_version": TRAILER_SCHEMA_VERSION, "items": listed}, separators=(",", ":")).encode()
    return text + _FOOTER.pack(FOOTER_MAGIC, len(text), zlib.crc32(text), 0)


def data_file_bytes(image_bytes: int, items: Sequence[tuple[int, int]]) -> int:
    """Return the size of the data file of an image, given the offset and length of each item."""
    return image_bytes + len(encode_trailer([TrailerItem(*place, "0" * _DIGEST_CHARACTERS) for place in items]))


def trailer_digest(encoded: bytes) -> str:
    """Return the manifest's digest of the data file that ends with `encoded`, as encode_trailer made it."""
    return _text_digest(encoded[: -_FOOTER.size])


def _text_digest(text: bytes) -> str:
    return _ITEMS_DIGEST + hashlib.sha256(text).hexdigest()


def is_data_file(entry: FileEntry) -> bool:
    """Say whether a file of a manifest ends with a list of its items."""
    return entry.digest.startswith(_ITEMS_DIGEST)


def read_trailer(location: Location, size: int, digest: str | None = None) -> Trailer:
    """Return the trailer of a data file of `size` bytes. `digest`, when given, is the manifest's, which it must have.

    Raises: CheckpointError naming the file.
    """
    place = str(location)
    if size < _FOOTER.size:
        raise CheckpointError(f"{place}: {size} bytes, a data file has at least {_FOOTER.size}; the file is damaged")
    tail = location.read_range(size - min(size, _TAIL_BYTES), min(size, _TAIL_BYTES))
    magic, text_bytes, crc, zero = _FOOTER.unpack_from(tail, len(tail) - _FOOTER.size)
    image_bytes = size - _FOOTER.size - text_bytes
    if magic != FOOTER_MAGIC or zero or image_bytes < 0:
        raise CheckpointError(f"{place}: does not end as a data file does; it is damaged or none")
    if text_bytes + _FOOTER.size <= len(tail):
        text = tail[len(tail) - _FOOTER.size - text_bytes : -_FOOTER.size]
    else:
        text = location.read_range(image_bytes, text_bytes)
    if zlib.crc32(text) != crc:
        raise CheckpointError(
            f"{place}: the list of items at byte {image_bytes} has CRC-32 {zlib.crc32(text):#010x}, expected"
            f" {crc:#010x}; the file is damaged"
        )
    if digest not in (None, _text_digest(text)):
        raise CheckpointError(
            f"{place}: its list of items is {_text_digest(text)}, the manifest says {digest}; it is damaged, or another"
            " file than the one that the manifest is of"
        )
    items = _TrailerObject.parse(text, place, TRAILER_SCHEMA_VERSION, "the file is damaged").items(image_bytes)
    return Trailer(items, image_bytes, _text_digest(text))


class _TrailerObject(JsonObject):
    """The JSON of a trailer."""

    def items(self, image_bytes: int) -> tuple[TrailerItem, ...]:
        listed = self._raw.get("items")
        if not isinstance(listed, list) or set(self) != {"schema_version", "items"}:
            raise CheckpointError(f"{self._place}: the list of items has not the one field 'items'; it is damaged")
        for entry in listed:
            is_item = isinstance(entry, list) and [type(value) for value in entry] == [int, int, str]
            if not is_item or not _HEX_DIGEST.fullmatch(entry[2]):
                raise CheckpointError(f"{self._place}: an entry of the list of items is not [offset, length, SHA-256]")
        items = tuple(TrailerItem(*entry) for entry in listed)
        problem = item_ranges_problem([(item.offset, item.length) for item in items], image_bytes)
        if problem is not None:
            raise CheckpointError(f"{self._place}: the list of items has {problem}; the file is damaged")
        return items


class ItemHasher:
    """Digests of the items of an image whose bytes go by in order, in pieces of any size. Nothing is copied.

    `place` names the image in errors.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], image_bytes: int, place: str) -> None:
        problem = item_ranges_problem(ranges, image_bytes)
        if problem is not None:
            raise CheckpointError(f"{place}: {problem}")
        self._ranges = ranges
        self._image_bytes = image_bytes
        self._place = place
        self._at = 0
        self._hash = hashlib.sha256()
        self._items: list[TrailerItem] = []
        self._dirty: list[int] = []

    @property
    def items(self) -> tuple[TrailerItem, ...]:
        """The items that have gone by."""
        return tuple(self._items)

    @property
    def dirty_padding(self) -> tuple[int, ...]:
        """Where bytes between items are not zero: the first of them in each piece that went by."""
        return tuple(self._dirty)

    def update(self, data: Bytes) -> None:
        """Take the next bytes of the image.

        Raises: CheckpointError when they are more than the image has.
        """
        with memoryview(data) as view, view.cast("B") as rest:
            if self._at + len(rest) > self._image_bytes:
                raise CheckpointError(
                    f"{self._place}: {self._at + len(rest)} bytes of an image of {self._image_bytes}; it has changed"
                )
            start = 0
            while start < len(rest):
                start += self._take(rest[start:])

    def _take(self, data: memoryview) -> int:
        """Take bytes up to where an item begins or ends, and return how many."""
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
            raise CheckpointError(f"{self._place}: ended after {self._at} of {self._image_bytes} bytes")
        if self._dirty:
            raise CheckpointError(f"{self._place}: {_padding_problem(self._dirty[0])}")
        return self.items


def _padding_problem(offset: int) -> str:
    return f"bytes that are not zero between items, from byte {offset} on; what wrote them is at fault"


def check_item(data: Bytes, item: TrailerItem, place: str) -> None:
    """Compare the bytes of an item with what the trailer says. `place` names the file.

    Raises: CheckpointError.
    """
    with memoryview(data) as view:
        num_bytes = view.nbytes
    found = hashlib.sha256(data).hexdigest()
    if num_bytes != item.length or found != item.digest:
        raise CheckpointError(f"{place}: {_item_problem(item, f'{num_bytes} bytes with SHA-256 {found}')}")


def _item_problem(item: TrailerItem, found: str) -> str:
    return (
        f"the item at byte {item.offset} is {found}, expected {item.length} bytes with SHA-256 {item.digest}; the file"
        " is damaged"
    )


def verify_checkpoint(directory: Location, *, job: str | None = None, branch: str | None = None) -> list[str]:
    """Read all of a checkpoint and return what is wrong with it, naming file and byte: nothing, when it is whole.

    `job` and `branch`, when given, are the ones that it must be of. What cannot be read is a problem too. Memory: some
    blocks of 8 MiB, and the lists of items.
    """
    try:
        manifest = read_manifest(directory, job=job, branch=branch)
        not_committed = commit_problem(directory)
    except CheckpointError as error:
        return [str(error)]
    problems = [not_committed] if not_committed is not None else []
    names = sorted(manifest.files)
    given_up = Event()
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        try:
            found = list(
                pool.map(lambda name: verify_file(directory / name, manifest.files[name], given_up.is_set), names)
            )
        except BaseException:
            given_up.set()  # an interrupt must not wait for files of many gigabytes
            raise
    problems += [problem for of_file in found for problem in of_file]
    damaged = {name for name, of_file in zip(names, found, strict=True) if of_file}
    return problems + _metadata_problems(directory, manifest, damaged)


def verify_file(location: Location, entry: FileEntry, is_given_up: Callable[[], bool] = lambda: False) -> list[str]:
    """Read a whole file of the manifest and return what is wrong with it, as verify_checkpoint does.

    Raises: CancelledError once the caller has cancelled, checked before each block.
    """
    verify = _verify_data_file if is_data_file(entry) else _verify_whole_file
    try:
        size = location.size()
        if size == entry.size:
            return verify(location, entry, is_given_up)
    except CheckpointError as error:
        return [str(error)]
    found = "missing" if size is None else f"{size} bytes"
    return [f"{location}: {found}, expected {entry.size} bytes; it was removed, cut short or replaced"]


def _verify_data_file(location: Location, entry: FileEntry, is_given_up: Callable[[], bool]) -> list[str]:
    trailer = read_trailer(location, entry.size, entry.digest)
    hasher = ItemHasher([(item.offset, item.length) for item in trailer.items], trailer.image_bytes, str(location))
    for block in _blocks(location, trailer.image_bytes, is_given_up):
        hasher.update(block)
    damaged = [
        f"{location}: {_item_problem(item, f'{found.length} bytes with SHA-256 {found.digest}')}"
        for item, found in zip(trailer.items, hasher.items, strict=True)
        if item != found
    ]
    return damaged + [f"{location}: {_padding_problem(offset)}" for offset in hasher.dirty_padding]


def _verify_whole_file(location: Location, entry: FileEntry, is_given_up: Callable[[], bool]) -> list[str]:
    found = hashlib.sha256()
    for block in _blocks(location, entry.size, is_given_up):
        found.update(block)
    if _WHOLE_DIGEST + found.hexdigest() == entry.digest:
        return []
    return [f"{location}: {_WHOLE_DIGEST}{found.hexdigest()}, the manifest says {entry.digest}; the file is damaged"]


def _blocks(location: Location, num_bytes: int, is_given_up: Callable[[], bool]) -> Iterator[bytes]:
    for start in range(0, num_bytes, _BLOCK_BYTES):
        if is_given_up():
            raise CancelledError
        yield location.read_range(start, min(_BLOCK_BYTES, num_bytes - start))


def _metadata_problems(directory: Location, manifest: Manifest, damaged: Set[str]) -> list[str]:
    """Return where metadata and files do not fit together; `damaged` files are reported already."""
    files, metadata = manifest.files, manifest.name_of(METADATA_NAME)
    place = directory / metadata
    if metadata in damaged:
        return []
    if metadata not in files:
        return [f"{manifest_place(directory)}: does not list {metadata}"]
    try:
        ranges_by_file = load_metadata(directory, metadata).ranges_by_file()
        problems = [
            f"{place}: names {name}, which the manifest does not list" for name in ranges_by_file.keys() - files
        ]
        for name in (ranges_by_file.keys() & files) - damaged:
            size, has_items = files[name].size, is_data_file(files[name])
            items = read_trailer(directory / name, size).items if has_items else ()
            known = {(item.offset, item.length) for item in items}
            for offset, length in ranges_by_file[name]:
                if (offset, length) not in known if has_items else offset + length > size:
                    problems.append(f"{place}: names bytes {offset} to {offset + length} of {name}, which are no item")
    except CheckpointError as error:
        return [str(error)]
    return sorted(problems)
