"""Data files and whole checkpoints: what is written is read back and verified, and any bit that flips is named."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import random
import re
import struct
import tracemalloc
import warnings
import zlib
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatrain.checkpoint.data_file import (
    ItemHasher,
    Trailer,
    TrailerItem,
    check_item,
    content_digest,
    encode_trailer,
    read_trailer,
    trailer_digest,
    verify_checkpoint,
    verify_file,
)
from megatrain.contracts.checkpoint_files import manifest_place, write_commit, write_manifest
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.location import LocalLocation, Location
from megatrain.contracts.manifest import FileEntry
from tests.helpers.checkpoint_tree import make_manifest

FILES = ("r000002-rank-00000.distcp", "r000002-rank-00001.distcp")


def image_of(contents: list[bytes]) -> tuple[bytes, list[tuple[int, int]]]:
    """Return an image with these items, and where they lie."""
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


@pytest.fixture
def place(tmp_path: Path) -> LocalLocation:
    return LocalLocation(tmp_path / FILES[0])


# One file


def test_the_bytes_are_those_that_the_format_says(place: LocalLocation) -> None:
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


@pytest.mark.parametrize("num_items", [0, 1, 5, 2000])
def test_the_trailer_is_read_back(place: LocalLocation, num_items: int) -> None:
    entry = put_data_file(place, [bytes([number % 256]) * (1 + number % 90) for number in range(num_items)])
    trailer = read_trailer(place, entry.size, entry.digest)

    assert len(trailer.items) == num_items
    assert trailer.digest == entry.digest
    for item in trailer.items:
        check_item(place.read_range(item.offset, item.length), item, str(place))
    assert verify_file(place, entry) == []


@given(st.lists(st.binary(min_size=1, max_size=200), max_size=12), st.lists(st.integers(1, 300), min_size=1))
def test_digests_do_not_depend_on_how_bytes_go_by(contents: list[bytes], steps: list[int]) -> None:
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


def test_an_image_that_is_not_what_was_planned_is_refused() -> None:
    def hashed(*pieces: bytes) -> ItemHasher:
        hasher = ItemHasher([(0, 10), (64, 10)], 128, "slot")
        for piece in pieces:
            hasher.update(piece)
        return hasher

    with pytest.raises(CheckpointError, match="slot: 129 bytes of an image of 128; it has changed"):
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
    """Put a file with this list of items in place, and return its size. `footer` changes fields of the footer."""
    values = {"magic": b"MTITEMS1", "length": len(text), "crc": zlib.crc32(text), "zero": 0, **footer}
    place.write(bytes(128) + text + struct.pack("<8sQII", *values.values()))
    return 128 + len(text) + 24


def listed(*items: Any, **more: Any) -> bytes:
    return json.dumps({"schema_version": 1, "items": items, **more}).encode()


ZEROS = hashlib.sha256(bytes(10)).hexdigest()


@pytest.mark.parametrize(
    ("text", "footer", "message"),
    [
        (listed(), {"magic": b"MTITEMS2"}, "does not end as a data file does"),
        (listed(), {"zero": 1}, "does not end as a data file does"),
        (listed(), {"length": 2**63}, "does not end as a data file does"),
        (listed(), {"length": 5}, "the list of items at byte 157 has CRC-32"),
        (listed(), {"crc": 1}, "has CRC-32 0x.*, expected 0x00000001; the file is damaged"),
        (b"", {}, "not JSON"),
        (b"[" * 10**5, {}, "not JSON"),
        (b"[]", {}, "a list, expected a JSON object"),
        (b'{"schema_version": 2, "items": []}', {}, "schema_version=2, this program reads 1"),
        (b'{"schema_version": 1}', {}, "has not the one field 'items'"),
        (listed(more=1), {}, "has not the one field 'items'"),
        (b'{"schema_version": 1, "items": {}}', {}, "has not the one field 'items'"),
        (listed(3), {}, r"is not \[offset, length, SHA-256\]"),
        (listed([0, 10]), {}, r"is not \[offset, length, SHA-256\]"),
        (listed([False, 10, ZEROS]), {}, r"is not \[offset, length, SHA-256\]"),
        (listed([0, 10.0, ZEROS]), {}, r"is not \[offset, length, SHA-256\]"),
        (listed([0, 10, ZEROS.upper()]), {}, r"is not \[offset, length, SHA-256\]"),
        (listed([0, 10, ZEROS + "0"]), {}, r"is not \[offset, length, SHA-256\]"),
        (listed([1, 10, ZEROS]), {}, "an item of 10 bytes at 1, expected"),
        (listed([0, 129, ZEROS]), {}, "an item that ends at 129, after the image's 128 bytes"),
        (listed([64, 10, ZEROS], [0, 10, ZEROS]), {}, "an item at 0, but the one before ends at 74"),
    ],
)
def test_a_trailer_that_makes_no_sense_names_the_file(
    place: LocalLocation, text: bytes, footer: dict[str, Any], message: str
) -> None:
    size = rewritten(place, text, **footer)
    with pytest.raises(CheckpointError, match=rf"r000002-rank-00000\.distcp: .*{message}"):
        read_trailer(place, size)


def test_a_file_too_short_for_a_trailer_is_named(place: LocalLocation) -> None:
    place.write(bytes(23))
    with pytest.raises(CheckpointError, match="23 bytes, a data file has at least 24"):
        read_trailer(place, 23)


def test_a_trailer_of_another_file_is_refused(place: LocalLocation) -> None:
    entry = put_data_file(place, [b"abc"])
    trailer = read_trailer(place, entry.size)
    assert isinstance(trailer, Trailer)
    other = put_data_file(place, [b"abx"])
    with pytest.raises(CheckpointError, match=f"its list of items is {other.digest}, the manifest says {entry.digest}"):
        read_trailer(place, other.size, entry.digest)


# A whole checkpoint


def boxes() -> dict[str, list[tuple[tuple[int, ...], torch.Tensor]]]:
    """Return the boxes of two files: (offsets, values) of "w", and in the first file all of "b" too."""
    w = torch.arange(24.0).view(4, 6)
    b = torch.arange(3.0)
    return {"w": [((0, 0), w[:3].clone()), ((3, 0), w[3:].clone())], "b": [((0,), b)]}


def put_checkpoint(directory: Location) -> Location:
    """Write a committed checkpoint of two data files as a writer would, and return its directory."""
    contents: dict[str, list[bytes]] = {name: [] for name in FILES}
    states, storage = {}, {}
    for key, parts in boxes().items():
        chunks = []
        for number, (offsets, values) in enumerate(parts):
            file = io.BytesIO()
            torch.save(values, file)
            contents[FILES[number]].append(file.getvalue())
            offset = image_of(contents[FILES[number]])[1][-1][0]
            storage[MetadataIndex(key, offsets, number)] = _StorageInfo(FILES[number], offset, len(file.getvalue()))
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), values.shape))
        shape = torch.Size((sum(len(values) for _, values in parts), *parts[0][1].shape[1:]))
        states[key] = TensorStorageMetadata(TensorProperties(torch.float32), shape, chunks)
    entries = {name: put_data_file(directory / name, parts) for name, parts in contents.items()}
    metadata = pickle.dumps(Metadata(states, storage_data=storage))
    for name, content in ((".metadata", metadata), ("tokenizer.json", b"{}")):
        (directory / name).write(content)
        entries[name] = FileEntry(len(content), content_digest(content))
    manifest = make_manifest(files=entries)
    write_manifest(directory, manifest)
    write_commit(directory, manifest)
    return directory


@pytest.fixture
def checkpoint(tmp_path: Path) -> Location:
    return put_checkpoint(LocalLocation(tmp_path / "main" / "step-000000120"))


def path_of(directory: Location, name: str) -> Path:
    return Path(str(directory / name))


def entries_of(directory: Location) -> dict[str, FileEntry]:
    raw = json.loads(manifest_place(directory).read())
    return {name: FileEntry(**entry) for name, entry in raw["files"].items()}


def test_a_whole_checkpoint_has_no_problem_and_stock_torch_reads_it(checkpoint: Location) -> None:
    assert verify_checkpoint(checkpoint, job="demo", branch="main") == []
    state = {"w": torch.zeros(4, 6), "b": torch.zeros(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(checkpoint), no_dist=True)
    assert torch.equal(state["w"], torch.arange(24.0).view(4, 6))
    assert torch.equal(state["b"], torch.arange(3.0))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([*FILES, ".metadata", "tokenizer.json"]), seed=st.integers(0, 2**32))
def test_any_bit_that_flips_is_found(checkpoint: Location, name: str, seed: int) -> None:
    path = path_of(checkpoint, name)
    before = path.read_bytes()
    bit = random.Random(seed).randrange(8 * len(before))
    after = bytearray(before)
    after[bit // 8] ^= 1 << bit % 8
    try:
        path.write_bytes(after)
        (problem,) = verify_checkpoint(checkpoint)
        assert problem.startswith(f"{path}: ")
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("item", [0, -1])
def test_bytes_between_items_and_after_the_last_must_be_zero(checkpoint: Location, item: int) -> None:
    path = path_of(checkpoint, FILES[0])
    offset, length = image_ranges(checkpoint)[item]
    content = bytearray(path.read_bytes())
    # the rest of the last 64 bytes of the item
    assert content[offset + length] == 0
    assert (offset + length) % 64
    content[offset + length] = 1
    path.write_bytes(content)
    assert verify_checkpoint(checkpoint) == [
        f"{path}: bytes that are not zero between items, from byte {offset + length} on; what wrote them is at fault"
    ]


def test_every_bit_of_manifest_and_commit_counts(checkpoint: Location) -> None:
    for name in (manifest_place(checkpoint).name, "COMMIT"):
        path = path_of(checkpoint, name)
        before = path.read_bytes()
        for at in range(0, len(before) - 1, 7):
            path.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
            problems = verify_checkpoint(checkpoint)
            is_renamed_field = name == "COMMIT" and json_or_none(path) is not None
            assert problems or is_renamed_field
            assert all(problem.startswith(str(checkpoint)) for problem in problems)
        path.write_bytes(before)


def json_or_none(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "missing, expected"),
        ("cut short", r"\d+ bytes, expected \d+ bytes; it was removed, cut short or replaced"),
        ("grown", r"\d+ bytes, expected \d+ bytes; it was removed, cut short or replaced"),
        ("of another rank", "its list of items is items-sha256:.*, the manifest says items-sha256:"),
        ("a directory", "missing, expected"),
    ],
)
def test_a_wrong_file_is_named(checkpoint: Location, kind: str, message: str) -> None:
    path = path_of(checkpoint, FILES[0])
    content = path.read_bytes()
    match kind:
        case "missing":
            path.unlink()
        case "cut short":
            path.write_bytes(content[:-1])
        case "grown":
            path.write_bytes(content + b"\0")
        case "of another rank":
            image, ranges = image_of([b"x" * length for _, length in image_ranges(checkpoint)])
            hasher = ItemHasher(ranges, len(image), "x")
            hasher.update(image)
            path.write_bytes(image + encode_trailer(hasher.finish()))
        case "a directory":
            path.unlink()
            path.mkdir()
    (problem,) = verify_checkpoint(checkpoint)
    assert problem.startswith(f"{path}: ")
    assert re.search(message, problem)


def image_ranges(directory: Location) -> list[tuple[int, int]]:
    entry = entries_of(directory)[FILES[0]]
    return [(item.offset, item.length) for item in read_trailer(directory / FILES[0], entry.size).items]


def test_every_problem_is_told(checkpoint: Location) -> None:
    for name in FILES:
        content = bytearray(path_of(checkpoint, name).read_bytes())
        content[100] ^= 1
        path_of(checkpoint, name).write_bytes(content)
    path_of(checkpoint, "tokenizer.json").unlink()
    path_of(checkpoint, "COMMIT").unlink()
    problems = verify_checkpoint(checkpoint)
    assert [problem.split(": ")[0] for problem in problems] == [
        str(checkpoint / name) for name in ("COMMIT", *FILES, "tokenizer.json")
    ]
    assert "the item at byte 0 is" in problems[1]


def test_a_checkpoint_of_another_job_or_branch_is_told(checkpoint: Location) -> None:
    for names, message in (({"job": "other"}, "job='demo', expected 'other'"), ({"branch": "b"}, "branch='main', exp")):
        (problem,) = verify_checkpoint(checkpoint, **names)
        assert message in problem
        assert problem.startswith(str(manifest_place(checkpoint)))


def test_a_directory_without_a_manifest_is_told(tmp_path: Path) -> None:
    (problem,) = verify_checkpoint(LocalLocation(tmp_path / "step-000000120"))
    assert "manifest.json" in problem


def test_metadata_and_files_that_do_not_fit_together_are_told(checkpoint: Location) -> None:
    entries = entries_of(checkpoint)
    place = checkpoint / ".metadata"

    def recommit(**changes: FileEntry | None) -> list[str]:
        files = {**entries, **{name.replace("_metadata", ".metadata"): entry for name, entry in changes.items()}}
        (checkpoint / "COMMIT").remove()
        manifest = make_manifest(files={name: entry for name, entry in files.items() if entry is not None})
        write_manifest(checkpoint, manifest)
        write_commit(checkpoint, manifest)
        return verify_checkpoint(checkpoint)

    assert recommit() == []
    assert recommit(_metadata=None) == [f"{manifest_place(checkpoint)}: does not list r000002-metadata"]
    assert recommit(**{FILES[1]: None}) == [f"{place}: names {FILES[1]}, which the manifest does not list"]
    # a file of items that are all whole, but of other lengths than the metadata says
    other = put_data_file(checkpoint / FILES[1], [b"x" * 5000])
    (problem,) = recommit(**{FILES[1]: other})
    assert problem.startswith(f"{place}: names bytes 0 to ")
    assert problem.endswith(f" of {FILES[1]}, which are no item")
    # a file that is not made of items, and too short
    (checkpoint / FILES[1]).write(b"x" * 100)
    (problem,) = recommit(**{FILES[1]: FileEntry(100, content_digest(b"x" * 100))})
    assert problem.startswith(f"{place}: names bytes 0 to ")
    (checkpoint / FILES[1]).write(b"x" * 10**4)
    assert recommit(**{FILES[1]: FileEntry(10**4, content_digest(b"x" * 10**4))}) == []


class BrokenLocation(LocalLocation):
    """A place whose disk gives errors after some bytes."""

    __slots__ = ()

    def read_range(self, offset: int, num_bytes: int) -> bytes:
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


def test_who_wants_to_know_no_more_waits_for_a_block_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.checkpoint.data_file._BLOCK_BYTES", 64)
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
