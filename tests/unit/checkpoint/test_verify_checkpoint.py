"""An intact checkpoint is verified: stock torch reads it, and any flipped bit is named."""

from __future__ import annotations

import io
import json
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.checkpoint.metadata_file import describing_files
from megatrain.checkpoint.verification import verify_checkpoint
from megatrain.checkpoint_format.checkpoint_files import manifest_location, write_manifest
from megatrain.checkpoint_format.commit import write_commit
from megatrain.checkpoint_format.data_file import (
    ItemHasher,
    content_digest,
    encode_trailer,
    read_trailer,
)
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import FileEntry
from megatrain.checkpoint_format.stored_tensors import StoredItem, StoredTensor, StoredTensors
from tests.helpers.checkpoint_tree import make_manifest
from tests.helpers.data_files import FILES, image_of, put_data_file
from tests.helpers.require import lazy_module

dcp = lazy_module("torch.distributed.checkpoint")


def boxes() -> dict[str, list[tuple[tuple[int, ...], torch.Tensor]]]:
    """Return the boxes of two files: (offsets, values) of "w", and in the first file all of "b" too."""
    w = torch.arange(24.0).view(4, 6)
    b = torch.arange(3.0)
    return {"w": [((0, 0), w[:3].clone()), ((3, 0), w[3:].clone())], "b": [((0,), b)]}


def put_checkpoint(directory: Location) -> Location:
    """Write a committed checkpoint of two data files as a writer would, and return its directory."""
    contents: dict[str, list[bytes]] = {name: [] for name in FILES}
    tensors = {}
    for key, parts in boxes().items():
        items = []
        for number, (offsets, values) in enumerate(parts):
            file = io.BytesIO()
            torch.save(values, file)
            contents[FILES[number]].append(file.getvalue())
            offset = image_of(contents[FILES[number]])[1][-1][0]
            items.append(StoredItem(offsets, tuple(values.shape), FILES[number], offset, len(file.getvalue())))
        shape = (sum(len(values) for _, values in parts), *parts[0][1].shape[1:])
        tensors[key] = StoredTensor(key, "float32", shape, tuple(items))
    entries = {name: put_data_file(directory / name, parts) for name, parts in contents.items()}
    for name, content in {**describing_files(StoredTensors(tensors)), "tokenizer.json": b"{}"}.items():
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
    raw = json.loads(manifest_location(directory).read())
    return {name: FileEntry(**entry) for name, entry in raw["files"].items()}


def test_whole_checkpoint_is_valid_and_stock_torch_reads_it(checkpoint: Location) -> None:
    assert verify_checkpoint(checkpoint, job="demo", branch="main") == []
    state = {"w": torch.zeros(4, 6), "b": torch.zeros(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(checkpoint), no_dist=True)
    assert torch.equal(state["w"], torch.arange(24.0).view(4, 6))
    assert torch.equal(state["b"], torch.arange(3.0))


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([*FILES, ".metadata", "index.json", "tokenizer.json"]), seed=st.integers(0, 2**32))
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
        (
            f"{path}: bytes that are not zero between items, from byte {offset + length} on; "
            "the program that wrote the file has a bug"
        )
    ]


def test_flipped_bits_of_manifest_and_commit_are_found(checkpoint: Location) -> None:
    for name in (manifest_location(checkpoint).name, "COMMIT"):
        path = path_of(checkpoint, name)
        before = path.read_bytes()
        for at in range(0, len(before) - 1, 31):
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
        ("of another rank", "its list of items has digest items-sha256:.*, and the manifest has items-sha256:"),
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


def test_every_problem_is_reported(checkpoint: Location) -> None:
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


def test_a_checkpoint_of_another_job_or_branch_is_reported(checkpoint: Location) -> None:
    for names, message in (({"job": "other"}, "job='demo', expected 'other'"), ({"branch": "b"}, "branch='main', exp")):
        (problem,) = verify_checkpoint(checkpoint, **names)
        assert message in problem
        assert problem.startswith(str(manifest_location(checkpoint)))


def test_a_directory_without_a_manifest_is_reported(tmp_path: Path) -> None:
    (problem,) = verify_checkpoint(LocalLocation(tmp_path / "step-000000120"))
    assert "has no manifest" in problem


def test_metadata_that_does_not_match_the_files_is_reported(checkpoint: Location) -> None:
    entries = entries_of(checkpoint)
    place = checkpoint / "index.json"

    def recommit(**changes: FileEntry | None) -> list[str]:
        files = {**entries, **{name.replace("_metadata", ".metadata"): entry for name, entry in changes.items()}}
        (checkpoint / "COMMIT").remove()
        manifest = make_manifest(files={name: entry for name, entry in files.items() if entry is not None})
        write_manifest(checkpoint, manifest)
        write_commit(checkpoint, manifest)
        return verify_checkpoint(checkpoint)

    assert recommit() == []
    assert recommit(_metadata=None) == [f"{manifest_location(checkpoint)}: does not list r000002-metadata"]
    assert recommit(**{"index.json": None}) == [f"{manifest_location(checkpoint)}: does not list r000002-index.json"]
    assert recommit(**{FILES[1]: None}) == [f"{place}: names {FILES[1]}, which the manifest does not list"]
    # a file whose items are all intact, but have other lengths than the metadata records
    other = put_data_file(checkpoint / FILES[1], [b"x" * 5000])
    (problem,) = recommit(**{FILES[1]: other})
    assert problem.startswith(f"{place}: names bytes 0 to ")
    assert problem.endswith(f" of {FILES[1]}, which are not an item")
    # a file that does not consist of items, and is too short
    (checkpoint / FILES[1]).write(b"x" * 100)
    (problem,) = recommit(**{FILES[1]: FileEntry(100, content_digest(b"x" * 100))})
    assert problem.startswith(f"{place}: names bytes 0 to ")
    (checkpoint / FILES[1]).write(b"x" * 10**4)
    assert recommit(**{FILES[1]: FileEntry(10**4, content_digest(b"x" * 10**4))}) == []
