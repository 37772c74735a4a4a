"""A checkpoint that one process writes is complete, stock torch reads it, and no other file is overwritten."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain.checkpoint.block_writer import BLOCK_BYTES, BlockThreads
from megatrain.checkpoint.image import ImageItem, plan_image
from megatrain.checkpoint.offline_writer import ImageFile, write_checkpoint
from megatrain.checkpoint.verification import verify_checkpoint
from megatrain.checkpoint_format.checkpoint_names import WRITING_NAME
from megatrain.checkpoint_format.commit import is_committed
from megatrain.checkpoint_format.data_file import ItemHasher, data_file_name, read_trailer, verify_file
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Sink
from megatrain.checkpoint_format.manifest import Manifest
from megatrain.contracts.errors import CheckpointError, SaveError
from megatrain.parallel.boxes import Box
from megatrain.parallel.sharding import FlatShard
from tests.helpers.checkpoint_tree import make_manifest, manifest_path
from tests.helpers.require import lazy_module

format_utils = lazy_module("torch.distributed.checkpoint.format_utils")

WHOLE = {
    "model.word": torch.arange(60.0).view(5, 12),
    "model.norm": torch.full((7,), 2.5, dtype=torch.bfloat16),
    "model.scale": torch.tensor(4.0, dtype=torch.float64),
}


def shard(key: str) -> tuple[str, FlatShard]:
    """Return a whole tensor without memory, as an input of a plan."""
    whole = WHOLE[key].to("meta")
    return "master", FlatShard(key.removeprefix("model."), whole.shape, Box((0,) * whole.dim(), whole.shape), whole)


def part(item: ImageItem) -> Tensor:
    ranges = zip(item.offsets, item.sizes, strict=True)
    return WHOLE[item.key][tuple(slice(at, at + size) for at, size in ranges)]


def write(place: LocalLocation, max_item_bytes: int = 50) -> Manifest:
    plans = [plan_image([shard("model.word"), shard("model.norm")], max_item_bytes), plan_image([shard("model.scale")])]
    manifest = make_manifest(has_optimizer=False, files={})
    return write_checkpoint(
        place, manifest, enumerate([*plans, plan_image([])]), part, lambda number: data_file_name(2, number),
        {"tokenizer.json": b"{}"},
    )  # fmt: skip


@pytest.mark.parametrize("max_item_bytes", [8, 50, 1000])
def test_stock_torch_reads_what_was_planned_without_memory(tmp_path: Path, max_item_bytes: int) -> None:
    manifest = write(LocalLocation(tmp_path / "saved"), max_item_bytes)

    assert verify_checkpoint(LocalLocation(tmp_path / "saved")) == []
    assert set(manifest.files) == {
        ".metadata", "index.json", "tokenizer.json", *(f"r000002-rank-{number:05d}.distcp" for number in range(3)),
    }  # fmt: skip
    assert set(os.listdir(tmp_path / "saved")) == {*manifest.files, manifest_path(tmp_path / "saved").name, "COMMIT"}
    format_utils.dcp_to_torch_save(tmp_path / "saved", tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert loaded.keys() == WHOLE.keys()
    for key, whole in WHOLE.items():
        assert loaded[key].dtype == whole.dtype
        assert torch.equal(loaded[key], whole)


def test_a_plan_without_memory_is_that_of_the_state_itself() -> None:
    base = torch.zeros(100)
    views = [base[40:70].view(5, 6), base[:30].view(30), torch.zeros(4)]
    shards = [
        ("master", FlatShard(f"x{number}", view.shape, Box((0,) * view.dim(), view.shape), view))
        for number, view in enumerate(views)
    ]
    hollow_base = torch.zeros(100, device="meta")
    hollow = [hollow_base[40:70].view(5, 6), hollow_base[:30].view(30), torch.zeros(4, device="meta")]
    copies = [
        (kind, FlatShard(one.name, one.global_shape, one.box, view))
        for (kind, one), view in zip(shards, hollow, strict=True)
    ]
    assert [item.key for item in plan_image(shards).items] == ["model.x1", "model.x0", "model.x2"]
    assert plan_image(shards).digest == plan_image(copies).digest


def test_a_complete_or_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    write(LocalLocation(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match="is a complete checkpoint already and is not overwritten"):
        write(LocalLocation(tmp_path / "saved"))
    (tmp_path / "saved/COMMIT").unlink()
    with pytest.raises(CheckpointError, match="which is not the output of a conversion"):
        write(LocalLocation(tmp_path / "saved"))
    assert manifest_path(tmp_path / "saved").exists()


@pytest.mark.parametrize("had_directory", [True, False])
@pytest.mark.parametrize("error", [CheckpointError("the source is gone"), KeyboardInterrupt()])
def test_interrupted_conversion_leaves_nothing(tmp_path: Path, error: BaseException, had_directory: bool) -> None:
    place = LocalLocation(tmp_path / "saved")
    if had_directory:
        place.path.mkdir()
    number = len(WHOLE)

    def failing(item: ImageItem) -> Tensor:
        nonlocal number
        number -= 1
        if not number:
            assert len(place.entries()) == 3, "WRITING, a complete file, and an incomplete one"
            raise error
        return part(item)

    plans = [(0, plan_image([shard("model.norm")])), (1, plan_image([shard("model.word")], 50))]
    with pytest.raises(type(error)):
        write_checkpoint(place, make_manifest(files={}), plans, failing, lambda number: data_file_name(2, number), {})
    assert place.entries() == []
    assert place.exists() is had_directory


@pytest.mark.parametrize("is_read_back", [True, False])
def test_a_commit_that_seems_to_fail_is_not_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_read_back: bool
) -> None:
    write_new, read, is_away = LocalLocation.write_new, LocalLocation.read, [False]

    def write_and_fail(self: LocalLocation, content: bytes) -> bool:
        write_new(self, content)
        is_away[0] = not is_read_back
        raise CheckpointError("the storage is away")

    def read_when_there(self: LocalLocation) -> bytes:
        if is_away[0]:
            is_away[0] = False
            raise CheckpointError("the storage is still away")
        return read(self)

    monkeypatch.setattr(LocalLocation, "write_new", write_and_fail)
    monkeypatch.setattr(LocalLocation, "read", read_when_there)
    if is_read_back:
        write(LocalLocation(tmp_path / "saved"))
    else:
        with pytest.raises(CheckpointError, match="the storage is away"):
            write(LocalLocation(tmp_path / "saved"))
    assert verify_checkpoint(LocalLocation(tmp_path / "saved")) == []


def test_repeated_conversion_replaces_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = LocalLocation(tmp_path / "saved")
    leftovers = [".metadata", "index.json", data_file_name(2, 7)]
    for name in (WRITING_NAME, *leftovers):
        (place / name).write(b"{}")
    assert not is_committed(place)
    removed: list[str] = []
    remove = LocalLocation.remove

    def remove_and_note(self: LocalLocation) -> None:
        removed.append(self.name)
        remove(self)

    monkeypatch.setattr(LocalLocation, "remove", remove_and_note)
    write(place)
    # the mark is removed after the files, and once more at the end of the new attempt
    assert removed == [*leftovers, WRITING_NAME, WRITING_NAME]
    assert verify_checkpoint(place) == []
    assert not (place / data_file_name(2, 7)).exists()


@pytest.fixture
def threads() -> Iterator[BlockThreads]:
    with closing(BlockThreads()) as found:
        yield found


def test_data_may_come_in_parts(tmp_path: Path, threads: BlockThreads) -> None:
    plan = plan_image([shard("model.word"), shard("model.norm")])
    whole, parts = (ImageFile(LocalLocation(tmp_path / name), plan, threads) for name in ("whole", "parts"))
    for item in plan.items:
        whole.append(part(item))
        for row in part(item):
            parts.append(row)
    assert whole.close() == parts.close()
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "parts").read_bytes()


def test_the_last_bytes_of_an_image_are_padding(tmp_path: Path, threads: BlockThreads) -> None:
    plan = plan_image([shard("model.norm")])
    place = LocalLocation(tmp_path / "file")
    file = ImageFile(place, plan, threads)
    file.append(part(plan.items[0]))
    entry = file.close()
    trailer = read_trailer(place, entry.size, entry.digest)
    assert trailer.image_bytes == plan.num_bytes
    assert [(item.offset, item.length) for item in trailer.items] == [(item.offset, item.length) for item in plan.items]


def test_an_image_of_many_blocks_is_written_in_order(tmp_path: Path, threads: BlockThreads) -> None:
    whole = torch.arange(5 * BLOCK_BYTES // 4 + 3, dtype=torch.int32)
    plan = plan_image([("master", FlatShard("big", whole.shape, Box((0,), whole.shape), whole.to("meta")))])
    places = [LocalLocation(tmp_path / name) for name in ("first", "second")]
    files = [ImageFile(place, plan, threads) for place in places]
    for item in plan.items:
        for piece in whole[item.offsets[0] : item.offsets[0] + item.sizes[0]].split(100_001):
            for file in files:  # One thread fills both alternately.
                file.append(piece)
    for file, place in zip(files, places, strict=True):
        assert verify_file(place, file.close()) == []
    assert whole.numpy().tobytes() in places[1].read()


class SlowSink:
    """A sink whose first write lasts until its block is filled again, or long enough for that to happen."""

    def __init__(self) -> None:
        self.is_filled_again = threading.Event()
        self.was_filled_while_written: list[bool] = []

    def write(self, buffer: bytes | bytearray | memoryview) -> None:
        self.was_filled_while_written.append(self.is_filled_again.wait(0.2))

    def close(self) -> None: ...

    def abort(self) -> None: ...


def test_block_that_is_being_written_is_not_filled_again(threads: BlockThreads) -> None:
    sink, hasher = SlowSink(), ItemHasher([], 0, "image")
    first = threads.free_block()
    threads.start(first, 0, hasher, sink)
    for _ in range(100):
        block = threads.free_block()
        if block is first:
            sink.is_filled_again.set()
            break
        threads.start(block, 0, hasher, sink)
    assert block is first, "blocks are used again"
    assert not sink.was_filled_while_written[0]


class FullDisk(LocalLocation):
    """A disk without space for a second block."""

    __slots__ = ()

    def __truediv__(self, name: str) -> FullDisk:
        return FullDisk(self.path / name)

    def create(self) -> Sink:
        sink = super().create()
        write, num_written = sink.write, [0]

        def write_little(buffer: bytes | bytearray | memoryview) -> None:
            num_written[0] += len(buffer)
            if num_written[0] > BLOCK_BYTES:
                raise CheckpointError(f"{self}: cannot be written: No space left on device")
            write(buffer)

        sink.write = write_little  # type: ignore[method-assign]
        return sink


def test_a_disk_that_becomes_full_leaves_nothing(tmp_path: Path) -> None:
    whole = torch.zeros(8 * BLOCK_BYTES)
    plan = plan_image([("master", FlatShard("big", whole.shape, Box((0,), whole.shape), whole.to("meta")))])
    with pytest.raises(SaveError, match=r"r000002-rank-00000.distcp: cannot be written: No space left on device"):
        write_checkpoint(
            FullDisk(tmp_path / "saved"), make_manifest(has_optimizer=False, files={}), [(0, plan)],
            lambda item: whole[item.offsets[0] : item.offsets[0] + item.sizes[0]],
            lambda number: data_file_name(2, number), {},
        )  # fmt: skip
    assert not (tmp_path / "saved").exists()
