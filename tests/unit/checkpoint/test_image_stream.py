"""A data file created block by block from a slot: the same bytes and digests with any blocks; no file after a
failure."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import pytest

from megatrain.arena.directory import Arena
from megatrain.arena.plans import RankPlan
from megatrain.arena.slot_file import SlotReader
from megatrain.arena.slot_layout import SealedSnapshot, SlotState, SlotWord
from megatrain.checkpoint import image_stream
from megatrain.checkpoint.image_stream import check_unchanged, write_data_file
from megatrain.checkpoint_format.data_file import read_trailer, verify_file
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.contracts.errors import CheckpointError
from tests.helpers.arena_snapshots import host_plan, image_bytes, item_ranges, make_arena, make_image, put_slot
from tests.helpers.hooked_location import HookedLocation

LENGTHS = (1000, 64, 77, 128, 5000)
SNAPSHOT = SealedSnapshot(step=10, round=2, snapshot=4)


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    arena = make_arena(tmp_path / "arena", host_plan("", ranks=(0,)), lengths=LENGTHS)
    put_slot(arena, 0, step=10, snapshot=4, lengths=LENGTHS)
    return arena


@pytest.fixture
def target(tmp_path: Path) -> Location:
    return LocalLocation(tmp_path / "file.distcp")


def plan_of(arena: Arena) -> RankPlan:
    return RankPlan.read(arena.rank_plan(0))


def set_word(path: Path, word: SlotWord, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(8 * word)
        file.write(struct.pack("<Q", value))


def test_the_image_arrives_with_its_digests(arena: Arena, target: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    image = make_image(0, 4, LENGTHS)
    for block_bytes in (64, 1000, 2048, 4096, 2**22):
        monkeypatch.setattr(image_stream, "_BLOCK_BYTES", block_bytes)
        with SlotReader(arena.slot(0, 0)) as slot:
            entry = write_data_file(target, slot, plan_of(arena), SNAPSHOT)
        content = target.read()
        assert content[: len(image)] == image, block_bytes
        assert len(content) == entry.size, block_bytes
        assert verify_file(target, entry) == [], block_bytes
        trailer = read_trailer(target, entry.size, entry.digest)
        assert [(item.offset, item.length) for item in trailer.items] == item_ranges(LENGTHS), block_bytes
        for item in trailer.items:
            assert item.digest == hashlib.sha256(image[item.offset : item.offset + item.length]).hexdigest()


def test_a_rank_that_saves_nothing_has_a_file_too(tmp_path: Path, target: Location) -> None:
    arena = make_arena(tmp_path / "arena", host_plan("", ranks=(0,)), lengths=())
    put_slot(arena, 0, step=10, snapshot=4, lengths=())
    with SlotReader(arena.slot(0, 0)) as slot:
        entry = write_data_file(target, slot, plan_of(arena), SNAPSHOT)
    assert verify_file(target, entry) == []
    assert read_trailer(target, entry.size).items == ()


@pytest.mark.parametrize("failing", ["append", "close"])
@pytest.mark.parametrize("number", [0, 3])
def test_failed_storage_leaves_no_file(
    arena: Arena, target: Location, monkeypatch: pytest.MonkeyPatch, failing: str, number: int
) -> None:
    monkeypatch.setattr(image_stream, "_BLOCK_BYTES", 512)
    left = [number if failing == "append" else 0]

    def fail(action: str, path: str) -> None:
        if action == failing:
            if left[0] == 0:
                raise CheckpointError("no space left")
            left[0] -= 1

    num_open = len(os.listdir("/proc/self/fd"))
    with SlotReader(arena.slot(0, 0)) as slot, pytest.raises(CheckpointError, match="no space left"):
        write_data_file(HookedLocation(target, fail), slot, plan_of(arena), SNAPSHOT)
    assert not target.exists()
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (SlotWord.SNAPSHOT, 6, "sealed, with snapshot 6 of step 10, while snapshot 4 of step 10 was read"),
        (SlotWord.STATE, 1, "writing, with snapshot 4 of step 10, while snapshot 4"),
        (SlotWord.STEP, 12, "sealed, with snapshot 4 of step 12, while snapshot 4 of step 10"),
        (SlotWord.ROUND, 3, "while snapshot 4 of step 10 was read from it, round 3 of the job took the slot over"),
        (SlotWord.STATE, 0, "a newer start of the job, which continues from storage, emptied the slot"),
        (SlotWord.ROUND, 1, "a worker must not change a slot whose snapshot is still being stored"),
    ],
)
def test_a_slot_that_is_used_again_while_it_is_read_is_an_error(
    arena: Arena, target: Location, word: SlotWord, value: int, message: str
) -> None:
    path = arena.slot(0, 0)

    def reuse(action: str, _: str) -> None:
        if action == "append":
            set_word(path, word, value)

    with SlotReader(path) as slot:
        check_unchanged(slot, SNAPSHOT)
        with pytest.raises(CheckpointError, match=rf"rank-00000\.slot-0: .*{message}"):
            write_data_file(HookedLocation(target, reuse), slot, plan_of(arena), SNAPSHOT)
    assert not target.exists()


def test_a_label_that_is_just_being_changed_is_waited_for(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    path = arena.slot(0, 0)
    set_word(path, SlotWord.STATE, SlotState.WRITING)
    monkeypatch.setattr(image_stream.time, "sleep", lambda _: set_word(path, SlotWord.ROUND, 3))
    with SlotReader(path) as slot, pytest.raises(CheckpointError, match="round 3 of the job took the slot over"):
        check_unchanged(slot, SNAPSHOT)


def test_bytes_between_items_that_are_not_zero_are_refused(arena: Arena, target: Location) -> None:
    image = bytearray(make_image(0, 4, LENGTHS))
    image[1001] = 1
    put_slot(arena, 0, step=10, snapshot=4, lengths=LENGTHS, image=bytes(image))
    with (
        SlotReader(arena.slot(0, 0)) as slot,
        pytest.raises(CheckpointError, match="not zero between items, from byte 1001"),
    ):
        write_data_file(target, slot, plan_of(arena), SNAPSHOT)
    assert not target.exists()


def test_memory_does_not_grow_with_the_image(tmp_path: Path, target: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks that storage receives are in one buffer."""
    lengths = (100_000,)
    arena = make_arena(tmp_path / "arena", host_plan("", ranks=(0,)), lengths=lengths)
    put_slot(arena, 0, step=10, snapshot=4, lengths=lengths)
    monkeypatch.setattr(image_stream, "_BLOCK_BYTES", 1024)
    buffers: set[int] = set()
    read = SlotReader.read_contents_into

    def note(self: SlotReader, offset: int, buffer: memoryview) -> None:
        buffers.add(id(buffer.obj))
        read(self, offset, buffer)

    monkeypatch.setattr(SlotReader, "read_contents_into", note)
    with SlotReader(arena.slot(0, 0)) as slot:
        write_data_file(target, slot, plan_of(arena), SNAPSHOT)
    assert len(buffers) == 1
    assert image_bytes(lengths) > 90 * 1024
