"""The snapshots of an arena that are sealed, and so can be used."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.arena.directory import Arena, SlotFile, arena_path, create_arena
from megatrain.arena.sealed import sealed_by_rank, sealed_steps
from megatrain.arena.slot_layout import HEADER_BYTES, SealedSnapshot, SlotHeader, SlotState, SlotWord, encode_header
from megatrain.contracts.errors import MissingFileError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return arena_path(tmp_path, "demo", "main", "/runs/demo/checkpoints")


def put_slot(path: Path, rank: int, slot: int, step: int, **changes: Any) -> None:
    values = {"state": SlotState.SEALED, "round": 2, "snapshot": step // 10, "header_rank": rank} | changes
    raw = bytearray(HEADER_BYTES + 8)
    header = encode_header(SlotHeader(values["header_rank"], slot, 2, 8, bytes(32)))
    raw[: len(header)] = header
    words = ((SlotWord.STATE, values["state"]), (SlotWord.STEP, step), (SlotWord.SNAPSHOT, values["snapshot"]))
    for word, value in (*words, (SlotWord.ROUND, values["round"])):
        struct.pack_into("<Q", raw, 8 * word, value)
    path.write_bytes(raw)


@pytest.fixture
def arena(path: Path) -> Arena:
    return create_arena(path)


Put = Callable[..., None]


@pytest.fixture
def put(arena: Arena) -> Put:
    """Return a function that writes the slots of a rank, one for each of these steps."""

    def put_slots(rank: int, *steps: int, **changes: Any) -> None:
        for slot, step in enumerate(steps):
            put_slot(arena.slot(rank, slot), rank, slot, step, **changes)

    return put_slots


def test_slots_and_copies_are_found_by_name(arena: Arena, put: Put) -> None:
    put(3, 10, 20)
    put_slot(arena.copy(100_000, 0), 100_000, 0, 10)
    for name in ("rank-3.slot-0", "rank-00003.slot-0.tmp", "x-00003.slot-0", "host.json", "rank-0000a.slot-0"):
        (arena.root / name).write_text("")
    assert arena.slots() == [
        SlotFile(arena.copy(100_000, 0), 100_000, 0, True),
        SlotFile(arena.slot(3, 0), 3, 0, False),
        SlotFile(arena.slot(3, 1), 3, 1, False),
    ]
    with pytest.raises(MissingFileError, match="the arena is gone"):
        Arena(arena.root / "gone").slots()


def test_a_step_counts_when_all_ranks_of_the_host_have_it(arena: Arena, put: Put) -> None:
    put(4, 20, 10)
    put(5, 20, 30)
    assert sealed_by_rank(arena) == {
        4: [SealedSnapshot(10, 2, 1), SealedSnapshot(20, 2, 2)],
        5: [SealedSnapshot(20, 2, 2), SealedSnapshot(30, 2, 3)],
    }
    assert sealed_steps(arena, [4, 5]) == [20]
    assert sealed_steps(arena, [4]) == [10, 20]
    assert sealed_steps(arena, [4, 5, 6]) == []
    assert sealed_steps(arena, [6, 4]) == []


def test_slot_of_another_or_no_snapshot_does_not_count(arena: Arena, put: Put) -> None:
    put(4, 20)
    others: tuple[dict[str, int], ...] = (
        {"state": SlotState.WRITING}, {"state": SlotState.EMPTY}, {"state": 9}, {"round": 3}, {"snapshot": 77},
        {"header_rank": 6},
    )  # fmt: skip
    for changes in others:
        put(5, 20, **changes)
        assert sealed_steps(arena, [4, 5]) == [], changes
        assert sealed_steps(arena, [4]) == [20]


def test_a_damaged_slot_does_not_count(arena: Arena, put: Put) -> None:
    put(4, 20, 10)
    put(5, 20, 10)
    os.truncate(arena.slot(5, 0), HEADER_BYTES)
    assert sealed_steps(arena, [4, 5]) == [10]


def test_copies_are_kept_apart(arena: Arena, put: Put) -> None:
    put(4, 20)
    put_slot(arena.copy(9, 1), 9, 1, 30)
    assert sealed_by_rank(arena) == {4: [SealedSnapshot(20, 2, 2)]}
    assert sealed_by_rank(arena, is_copy=True) == {9: [SealedSnapshot(30, 2, 3)]}
