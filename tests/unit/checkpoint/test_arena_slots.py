"""A rank's slots: reused only for the same plan, whole or not at all, and allocated before they are written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatrain.arena.directory import Arena, create_arena
from megatrain.arena.sealed import sealed_by_rank
from megatrain.arena.slot_file import SlotReader, write_persist
from megatrain.arena.slot_layout import Persist, SealedSnapshot, SlotState, slot_bytes
from megatrain.checkpoint.arena_slots import (
    ArenaSlot,
    SnapshotLabel,
    SnapshotPlan,
    missing_slot_bytes,
    open_slots,
    plan_snapshot,
)
from megatrain.checkpoint.ownership import SavedShard
from megatrain.contracts.errors import CheckpointError
from megatrain.parallel.boxes import Box
from megatrain.parallel.placement import ShardHolders
from megatrain.parallel.sharding import FlatShard
from tests.helpers.arena_snapshots import read_contents

RANK = 3
LABEL = SnapshotLabel(step=120, round=2, consumed_samples=960, consumed_tokens=61_440, num_updates=118, num_skipped=2)


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return create_arena(tmp_path / "arena")


def state(size: int = 1000) -> list[SavedShard]:
    """Return a state of which this rank writes the first part and its tp peer the rest."""
    weight, norm = torch.arange(size, dtype=torch.float32), torch.full((300,), 7.0)
    return [
        SavedShard("master", FlatShard("weight", (size,), Box((0,), (size,)), weight)),
        SavedShard("master", FlatShard("norm", (300,), Box((0,), (300,)), norm, ShardHolders(("tp",), 1, 2))),
    ]


def slots_of(arena: Arena, plan: SnapshotPlan, num_slots: int = 2) -> list[ArenaSlot]:
    return open_slots(arena, RANK, num_slots, plan, is_pinned=False)


def test_a_snapshot_holds_all_state_and_its_file_the_owned_part() -> None:
    plan = plan_snapshot(state())
    assert [item.key for item in plan.file.items] == ["model.weight"]
    assert [item.key for item in plan.rest.items] == ["model.norm"]
    assert plan.num_bytes == plan.file.num_bytes + plan.rest.num_bytes


def test_copied_state_comes_back_also_for_another_owner(arena: Arena) -> None:
    shards = state()
    (slot,) = slots_of(arena, plan_snapshot(shards), num_slots=1)
    expected = [shard.shard.tensor.clone() for shard in shards]
    slot.begin(LABEL, 5)
    slot.copy_out()
    slot.seal()
    for shard in shards:
        shard.shard.tensor.fill_(-1.0)
    assert sealed_by_rank(arena) == {RANK: [SealedSnapshot(step=120, round=2, snapshot=5)]}
    slot.copy_in()
    assert all(torch.equal(shard.shard.tensor, before) for shard, before in zip(shards, expected, strict=True))
    slot.close()


def test_the_label_matches_the_slot(arena: Arena) -> None:
    slot, _ = slots_of(arena, plan_snapshot(state()))
    slot.begin(LABEL, 5)
    assert slot.words().state == SlotState.WRITING
    assert sealed_by_rank(arena) == {}
    slot.seal()
    words = slot.words()
    assert (words.step, words.round, words.snapshot, words.num_updates, words.num_skipped) == (120, 2, 5, 118, 2)
    assert (words.consumed_samples, words.consumed_tokens) == (960, 61_440)
    assert (words.state, words.persist) == (SlotState.SEALED, Persist.PENDING)
    assert words.sealed_unix_ns > 0


def test_a_slot_is_free_when_storage_has_it_or_will_not(arena: Arena) -> None:
    slot, other = slots_of(arena, plan_snapshot(state()))
    assert slot.is_free()
    slot.begin(LABEL, 5)
    slot.seal()
    assert not slot.is_free()
    assert other.is_free()
    for outcome in (Persist.DONE, Persist.FAILED):
        assert write_persist(slot.path, 5, outcome)
        assert slot.is_free()
        slot.begin(LABEL, 5)
        slot.seal()


def test_a_new_process_of_the_same_plan_finds_what_was_there(arena: Arena) -> None:
    slot, _ = slots_of(arena, plan_snapshot(state()))
    slot.begin(LABEL, 5)
    slot.copy_out()
    slot.seal()
    slot.close()
    later = state()
    plan = plan_snapshot(later)
    assert missing_slot_bytes(arena, RANK, 2, plan) == 0
    for one in later:
        one.shard.tensor.zero_()
    again, fresh = slots_of(arena, plan)
    assert (again.words().snapshot, fresh.words().state) == (5, SlotState.EMPTY)
    again.copy_in()
    assert torch.equal(later[0].shard.tensor, torch.arange(1000, dtype=torch.float32))


def test_a_slot_of_another_plan_gives_way(arena: Arena) -> None:
    for slot in slots_of(arena, plan_snapshot(state())):
        slot.begin(LABEL, 5)
        slot.seal()
        slot.close()
    plan = plan_snapshot(state(size=2000))
    assert missing_slot_bytes(arena, RANK, 2, plan) == 2 * slot_bytes(plan.num_bytes)
    assert arena.slots() == []
    assert [slot.words().state for slot in slots_of(arena, plan)] == [SlotState.EMPTY] * 2


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_file_with_the_name_of_a_slot_is_replaced(arena: Arena, tmp_path: Path, kind: str) -> None:
    """Opening a FIFO would wait forever for its other end."""
    if kind == "fifo":
        os.mkfifo(arena.slot(RANK, 0))
    else:
        arena.slot(RANK, 0).symlink_to(tmp_path)
    plan = plan_snapshot(state())
    assert missing_slot_bytes(arena, RANK, 2, plan) == 2 * slot_bytes(plan.num_bytes)
    assert [slot.words().state for slot in slots_of(arena, plan)] == [SlotState.EMPTY] * 2


def test_a_directory_with_the_name_of_a_slot_is_named(arena: Arena) -> None:
    arena.slot(RANK, 1).mkdir()
    with pytest.raises(
        CheckpointError, match=r"rank-00003.slot-1: cannot be removed: .*; the arena is damaged, remove"
    ):
        missing_slot_bytes(arena, RANK, 2, plan_snapshot(state()))


def test_the_file_in_a_slot_has_its_envelopes_from_the_start(arena: Arena) -> None:
    shards = state()
    plan = plan_snapshot(shards)
    slot, _ = slots_of(arena, plan)
    slot.begin(LABEL, 1)
    slot.copy_out()
    with SlotReader(slot.path) as reader:
        (item,) = plan.file.items
        (tmp := arena.root / "item").write_bytes(read_contents(reader, item.offset, item.length))
    assert torch.equal(torch.load(tmp, weights_only=True), shards[0].shard.tensor)


def test_a_full_memory_is_an_error_and_leaves_nothing(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatrain.arena.slot_file.os.posix_fallocate", no_space)
    with pytest.raises(
        CheckpointError, match=r"rank-00003\.slot-0: .* has no space for a slot of \d+ bytes; give it more"
    ):
        slots_of(arena, plan_snapshot(state()))
    assert list(arena.root.iterdir()) == []
