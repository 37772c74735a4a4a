"""One data file: its content is read back and verified, and a bad trailer is named."""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
import zlib
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.checkpoint_format.data_file import (
    ItemHasher,
    Trailer,
    TrailerItem,
    check_item,
    content_digest,
    encode_trailer,
    read_trailer,
    verify_file,
)
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.manifest import FileEntry
from megatrain.contracts.errors import CheckpointError
from tests.helpers.data_files import FILES, image_of, put_data_file


@pytest.fixture
def place(tmp_path: Path) -> LocalLocation:
    return LocalLocation(tmp_path / FILES[0])


def test_the_bytes_follow_the_format(place: LocalLocation) -> None:
    contents = [b"a" * 70, b"b"]
    entry = put_data_file(place, contents)

    raw = place.read()
    magic, length, crc, zero = struct.unpack("<8sQII", raw[-24:])
    text = raw[-24 - length : -24]
    assert (magic, crc, zero, len(raw)) == (b"MTITEMS1", zlib.crc32(text), 0, entry.size)
    assert raw[: -24 - length] == b"a" * 70 + b"\0" * 58 + b"b" + b"\0" * 63
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    assert json.loads(text) == {"schema_version": 1, "items": [[0, 70, digests[0]], [128, 1, digests[1]]]}
    assert entry.digest == f"items-sha256:{hashlib.sha256(text).hexdigest()}"


def test_the_trailer_is_read_back(place: LocalLocation) -> None:
    for num_items in (0, 1, 500):
        entry = put_data_file(place, [bytes([number % 256]) * (1 + number % 90) for number in range(num_items)])
        trailer = read_trailer(place, entry.size, entry.digest)

        assert len(trailer.items) == num_items
        assert trailer.digest == entry.digest
        for item in trailer.items:
            check_item(place.read_range(item.offset, item.length), item, str(place))
        assert verify_file(place, entry) == []


@settings(max_examples=40)
@given(st.lists(st.binary(min_size=1, max_size=200), max_size=12), st.lists(st.integers(1, 300), min_size=1))
def test_digests_do_not_depend_on_the_size_of_the_pieces(contents: list[bytes], steps: list[int]) -> None:
    image, ranges = image_of(contents)
    hasher = ItemHasher(ranges, len(image), "x")
    at = 0
    while at < len(image):
        step = steps[at % len(steps)]
        hasher.update(memoryview(bytearray(image))[at : at + step])
        at += step
    expected = [
        TrailerItem(offset, length, hashlib.sha256(content).hexdigest())
        for (offset, length), content in zip(ranges, contents, strict=True)
    ]
    assert list(hasher.finish()) == expected
    assert encode_trailer(expected) == encode_trailer(hasher.items)


def test_hashing_copies_nothing() -> None:
    num_bytes = 8 * 2**20
    hasher = ItemHasher([(0, num_bytes // 2), (num_bytes // 2, num_bytes // 2)], num_bytes, "x")
    data = bytearray(num_bytes)
    tracemalloc.start()
    try:
        hasher.update(data)
        check_item(memoryview(data).cast("f")[: num_bytes // 8], hasher.finish()[0], "x")
        assert tracemalloc.get_traced_memory()[1] < 10**5
    finally:
        tracemalloc.stop()


def test_image_of_another_size_or_with_other_gaps_is_refused() -> None:
    def hashed(*pieces: bytes) -> ItemHasher:
        hasher = ItemHasher([(0, 10), (64, 10)], 128, "slot")
        for piece in pieces:
            hasher.update(piece)
        return hasher

    with pytest.raises(CheckpointError, match="slot: 129 bytes of an image of 128; it changed while"):
        hashed(bytes(100), bytes(29))
    with pytest.raises(CheckpointError, match="slot: ended after 127 of 128 bytes"):
        hashed(bytes(127)).finish()
    with pytest.raises(CheckpointError, match="slot: bytes that are not zero between items, from byte 10 on"):
        hashed(bytes(10), b"\1", bytes(117)).finish()
    with pytest.raises(CheckpointError, match="from byte 127 on"):
        hashed(bytes(127) + b"\1").finish()
    for ranges, message in (
        ([(0, 10), (32, 10)], "slot: an item of 10 bytes at 32, expected at least 1 at a multiple of 64"),
        ([(0, 0)], "an item of 0 bytes at 0"),
        ([(0, 65), (64, 1)], "an item at 64, but the one before ends at 65"),
        ([(-64, 10)], "an item at -64, but the one before ends at 0"),
        ([(64, 65)], "an item that ends at 129, after the image's 128 bytes"),
    ):
        with pytest.raises(CheckpointError, match=message):
            ItemHasher(ranges, 128, "slot")


def test_an_item_is_compared_with_the_trailer() -> None:
    item = TrailerItem(64, 3, hashlib.sha256(b"abc").hexdigest())
    check_item(b"abc", item, "f")
    for data in (b"abx", b"ab", b"abcd", b""):
        with pytest.raises(CheckpointError, match=r"f: the item at byte 64 is \d bytes with SHA-256 .*, expected 3 by"):
            check_item(data, item, "f")


def rewritten(place: LocalLocation, text: bytes, **footer: Any) -> int:
    """Replace the file by one with this list of items, and return its size. `footer` changes fields of the footer."""
    values = {"magic": b"MTITEMS1", "length": len(text), "crc": zlib.crc32(text), "zero": 0, **footer}
    place.write(bytes(128) + text + struct.pack("<8sQII", *values.values()))
    return 128 + len(text) + 24


def listed(*items: Any, **more: Any) -> bytes:
    return json.dumps({"schema_version": 1, "items": items, **more}).encode()


ZEROS = hashlib.sha256(bytes(10)).hexdigest()


BAD_TRAILERS: list[tuple[bytes, dict[str, Any], str]] = [
    (listed(), {"magic": b"MTITEMS2"}, "does not end with the footer of a data file"),
    (listed(), {"zero": 1}, "does not end with the footer of a data file"),
    (listed(), {"length": 2**63}, "does not end with the footer of a data file"),
    (listed(), {"length": 5}, "the list of items at byte 157 has CRC-32"),
    (listed(), {"crc": 1}, "has CRC-32 0x.*, expected 0x00000001; the file is damaged"),
    (b"", {}, "not JSON"),
    (b"[" * 10**5, {}, "not JSON"),
    (b"[]", {}, "a list, expected a JSON object"),
    (b'{"schema_version": 2, "items": []}', {}, "schema_version=2, this program reads 1"),
    (b'{"schema_version": 1}', {}, "must have 'items' as its only field"),
    (listed(more=1), {}, "must have 'items' as its only field"),
    (b'{"schema_version": 1, "items": {}}', {}, "must have 'items' as its only field"),
    (listed(3), {}, r"is not \[offset, length, SHA-256\]"),
    (listed([0, 10]), {}, r"is not \[offset, length, SHA-256\]"),
    (listed([False, 10, ZEROS]), {}, r"is not \[offset, length, SHA-256\]"),
    (listed([0, 10.0, ZEROS]), {}, r"is not \[offset, length, SHA-256\]"),
    (listed([0, 10, ZEROS.upper()]), {}, r"is not \[offset, length, SHA-256\]"),
    (listed([0, 10, ZEROS + "0"]), {}, r"is not \[offset, length, SHA-256\]"),
    (listed([1, 10, ZEROS]), {}, "an item of 10 bytes at 1, expected"),
    (listed([0, 129, ZEROS]), {}, "an item that ends at 129, after the image's 128 bytes"),
    (listed([64, 10, ZEROS], [0, 10, ZEROS]), {}, "an item at 0, but the one before ends at 74"),
]


def test_bad_trailer_is_named_with_its_file(place: LocalLocation) -> None:
    for text, footer, message in BAD_TRAILERS:
        size = rewritten(place, text, **footer)
        with pytest.raises(CheckpointError, match=rf"r000002-rank-00000\.distcp: .*{message}"):
            read_trailer(place, size)
    place.write(bytes(23))
    with pytest.raises(CheckpointError, match="23 bytes, and a data file has at least 24"):
        read_trailer(place, 23)


def test_a_trailer_of_another_file_is_refused(place: LocalLocation) -> None:
    entry = put_data_file(place, [b"abc"])
    trailer = read_trailer(place, entry.size)
    assert isinstance(trailer, Trailer)
    other = put_data_file(place, [b"abx"])
    with pytest.raises(
        CheckpointError, match=f"its list of items has digest {other.digest}, and the manifest has {entry.digest}"
    ):
        read_trailer(place, other.size, entry.digest)


class BrokenLocation(LocalLocation):
    """A location whose disk gives errors after some bytes."""

    __slots__ = ()

    def read_range(self, offset: int, num_bytes: int) -> bytearray:
        raise CheckpointError(f"{self}: cannot be read: Input/output error")


def test_a_file_that_cannot_be_read_is_a_problem(place: LocalLocation) -> None:
    entry = put_data_file(place, [b"abc"])
    for found in (entry, FileEntry(entry.size, content_digest(place.read()))):
        assert verify_file(place, FileEntry(found.size, found.digest)) == []
        (problem,) = verify_file(BrokenLocation(place.path), found)
        assert problem == f"{place}: cannot be read: Input/output error"


def test_a_big_file_is_read_in_blocks(place: LocalLocation) -> None:
    entry = put_data_file(place, [bytes(20 * 2**20), b"end"])
    tracemalloc.start()
    try:
        assert verify_file(place, entry) == []
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


def test_cancelled_verification_ends_within_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.checkpoint_format.data_file._BLOCK_BYTES", 64)
    place = LocalLocation(tmp_path / FILES[0])
    data = put_data_file(place, [b"x" * 1000])
    (tmp_path / "whole").write_bytes(b"x" * 1000)
    whole = FileEntry(1000, content_digest(b"x" * 1000))
    for location, entry in ((place, data), (LocalLocation(tmp_path / "whole"), whole)):
        num_asked = 0

        def is_given_up() -> bool:
            nonlocal num_asked
            num_asked += 1
            return num_asked > 3

        with pytest.raises(CancelledError):
            verify_file(location, entry, is_given_up)
        assert num_asked == 4
