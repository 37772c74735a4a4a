"""Slots for copies: created once, filled by their files, renamed with a round, and removed when no longer needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.arena.directory import Arena, SlotFile, create_arena
from megatrain.arena.sealed import sealed_by_rank
from megatrain.arena.slot_file import SlotReader
from megatrain.arena.slot_layout import Persist, SealedSnapshot, SlotState, SlotWords, slot_bytes
from megatrain.checkpoint.copy_slots import (
    SlotFiller,
    missing_copy_bytes,
    open_copy_slots,
    removable_copies,
    remove_copies,
    slot_to_overwrite,
)
from megatrain.checkpoint.snapshot_offer import PlannedSlot, SnapshotOffer, SnapshotRequest
from megatrain.contracts.errors import CheckpointError
from tests.helpers.arena_snapshots import read_contents

PLANNED = PlannedSlot(owner=7, contents_bytes=1000, plan_digest="ab" * 32)
OFFER = SnapshotOffer(
    owner=7,
    contents_bytes=1000,
    plan_digest="ab" * 32,
    step=120,
    snapshot=5,
    round=2,
    consumed_samples=960,
    consumed_tokens=61_440,
    num_updates=118,
    num_skipped=2,
    sealed_unix_ns=1_790_000_000_000_000_000,
)
SEALED = SealedSnapshot(step=120, round=2, snapshot=5)


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return create_arena(tmp_path / "arena")


@pytest.fixture
def slots(arena: Arena) -> Iterator[list[SlotFiller]]:
    found = open_copy_slots(arena, PLANNED)
    yield found
    for slot in found:
        slot.close()


def fill(slot: SlotFiller, content: bytes = b"x" * 1000) -> None:
    slot.begin(OFFER)
    slot.write(0, memoryview(content)[:600])
    slot.write(600, memoryview(content)[600:])
    slot.seal()


def test_two_slots_are_made_and_their_memory_is_reserved(arena: Arena, slots: list[SlotFiller]) -> None:
    assert [slot.path.name for slot in slots] == ["copy-00007.slot-0", "copy-00007.slot-1"]
    for slot in slots:
        assert slot.words().state == SlotState.EMPTY
        status = slot.path.stat()
        assert status.st_size == slot_bytes(1000)
        assert status.st_blocks * 512 >= status.st_size


def test_filled_slot_has_the_label_and_contents_of_the_owners(arena: Arena, slots: list[SlotFiller]) -> None:
    fill(slots[1])
    assert sealed_by_rank(arena, is_copy=True) == {7: [SEALED]}
    with SlotReader(slots[1].path) as reader:
        assert SnapshotOffer.of_slot(reader) == OFFER
        assert read_contents(reader, 0, 1000) == b"x" * 1000
        assert reader.words().persist == Persist.NONE
    with SlotReader(slots[0].path) as reader:
        assert SnapshotOffer.of_slot(reader) is None


def test_a_slot_that_is_being_filled_holds_nothing(arena: Arena, slots: list[SlotFiller]) -> None:
    fill(slots[0])
    slots[0].begin(replace(OFFER, snapshot=6))
    assert sealed_by_rank(arena, is_copy=True) == {}
    slots[0].seal()
    slots[0].clear()
    assert sealed_by_rank(arena, is_copy=True) == {}


def test_a_new_process_of_the_same_plan_finds_what_was_there(arena: Arena, slots: list[SlotFiller]) -> None:
    fill(slots[0])
    assert missing_copy_bytes(arena, PLANNED) == 0
    again = open_copy_slots(arena, PLANNED)
    assert again[0].words().snapshot == 5
    for slot in again:
        slot.close()


@pytest.mark.parametrize("change", [{"contents_bytes": 2000}, {"plan_digest": "cd" * 32}])
def test_copies_of_another_plan_give_way(arena: Arena, slots: list[SlotFiller], change: dict[str, object]) -> None:
    fill(slots[0])
    planned = replace(PLANNED, **change)  # type: ignore[arg-type]
    assert missing_copy_bytes(arena, planned) == 2 * slot_bytes(planned.contents_bytes)
    assert arena.slots() == []
    assert missing_copy_bytes(arena, planned) == 2 * slot_bytes(planned.contents_bytes)
    reopened = open_copy_slots(arena, planned)
    assert [slot.words().state for slot in reopened] == [SlotState.EMPTY] * 2
    for slot in reopened:
        slot.close()


def test_a_snapshot_can_become_one_of_another_round(arena: Arena, slots: list[SlotFiller]) -> None:
    fill(slots[0])
    after = SealedSnapshot(120, 3, 9)
    for slot in slots:
        slot.relabel(SEALED, after, Persist.PENDING)
    assert sealed_by_rank(arena, is_copy=True) == {7: [after]}
    assert slots[0].words().persist == Persist.PENDING
    assert slots[1].words().state == SlotState.EMPTY
    # It holds another snapshot now, and stays unchanged.
    slots[0].relabel(SEALED, SealedSnapshot(120, 4, 11), Persist.NONE)
    assert sealed_by_rank(arena, is_copy=True) == {7: [after]}


def test_a_slot_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone: the slot cannot be opened: No such file"):
        SlotFiller(tmp_path / "gone")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"link: the slot cannot be opened"):
        SlotFiller(tmp_path / "link")


def words(state: SlotState, snapshot: int) -> SlotWords:
    return SlotWords(state, 0, snapshot, 0, 0, 0, 0, 0, 0, Persist.NONE)


def test_the_last_whole_copy_is_never_overwritten() -> None:
    for found, expected in [
        ([(SlotState.EMPTY, 0), (SlotState.EMPTY, 0)], 0),
        ([(SlotState.SEALED, 4), (SlotState.EMPTY, 9)], 1),
        ([(SlotState.WRITING, 9), (SlotState.SEALED, 4)], 0),
        ([(SlotState.SEALED, 4), (SlotState.WRITING, 9)], 1),
        ([(SlotState.SEALED, 4), (SlotState.SEALED, 5)], 0),
        ([(SlotState.SEALED, 6), (SlotState.SEALED, 5)], 1),
    ]:
        assert slot_to_overwrite([words(*one) for one in found]) == expected, found


def test_copies_without_a_keeper_or_a_use_are_removed(tmp_path: Path) -> None:
    files = [
        SlotFile(tmp_path / "rank-00001.slot-0", 1, 0, is_copy=False),
        *(SlotFile(tmp_path / f"copy-{rank:05d}.slot-0", rank, 0, is_copy=True) for rank in (1, 2, 3)),
    ]
    assert removable_copies(files, kept={1}, needed={1, 2}) == ([files[3]], [files[2]])
    assert removable_copies(files, kept=set(), needed=set()) == (files[1:], [])
    files[3].path.touch()
    remove_copies(files[3:])
    remove_copies(files[3:])
    assert not files[3].path.exists()


def test_offers_and_requests_round_trip() -> None:
    assert SnapshotOffer.decode(OFFER.encode(), "peer") == OFFER
    request = SnapshotRequest(OFFER.planned, OFFER.sealed)
    assert SnapshotRequest.decode(request.encode(), "peer") == request
    assert (request.planned, request.sealed) == (PLANNED, SEALED)


def test_malformed_offer_is_refused() -> None:
    for message, problem in [
        (b"\xff", "peer: not UTF-8"),
        (b"[]", "peer: a list, expected a JSON object"),
        (b'{"schema_version": 2}', "schema_version=2, this program reads 1"),
        (
            OFFER.encode().replace(b'"contents_bytes": 1000', b'"contents_bytes": -1'),
            "contents_bytes=-1; expected an integer",
        ),
        (OFFER.encode().replace(b'"owner": 7', b'"owner": true'), "owner=True; expected an integer"),
        (OFFER.encode().replace(b'"owner"', b'"path"'), "path=7; no such field"),
    ]:
        with pytest.raises(CheckpointError, match=problem):
            SnapshotOffer.decode(message, "peer")
