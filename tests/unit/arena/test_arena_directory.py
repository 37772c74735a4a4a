"""The arena's directory: its name, permissions and refused files; and the snapshots in it that are sealed."""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.arena.directory import Arena, SlotFile, arena_path, create_arena, join_arena, open_arena, remove_arena
from megatrain.arena.sealed import sealed_by_rank
from megatrain.arena.slot_layout import HEADER_BYTES, SealedSnapshot, SlotHeader, SlotState, SlotWord, encode_header
from megatrain.contracts.errors import CheckpointError, MissingFileError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return arena_path(tmp_path, "demo", "main", "/runs/demo/checkpoints")


def test_names_of_an_arena_are_fixed(path: Path) -> None:
    arena = Arena(path)
    assert path.name == "megatrain-arena1.demo.main.964080e6"
    names = (
        arena.slot(3, 0), arena.copy(7, 1), arena.host_plan, arena.rank_plan(3), arena.metadata(2), arena.index(2),
        arena.writer_status, arena.wake, arena.writer_lock, arena.workers_lock,
    )  # fmt: skip
    assert [name.relative_to(path).as_posix() for name in names] == [
        "rank-00003.slot-0", "copy-00007.slot-1", "host.json", "plan-00003.json", "metadata-r000002.bin",
        "index-r000002.json", "status.json", "wake", "writer.lock", "workers.lock",
    ]  # fmt: skip


def test_different_jobs_have_different_arenas(tmp_path: Path) -> None:
    names = ["a", "a.b", "a/b", "../a", "", "a" * 300, "tr\u00e4um"]
    paths = {arena_path(tmp_path, job, branch, place) for job in names for branch in names for place in ("x", "y")}
    assert len(paths) == 2 * len(names) ** 2
    for path in paths:
        assert path.parent == tmp_path
        assert re.fullmatch(r"megatrain-arena1\.[\w-]+\.[\w-]+\.[0-9a-f]{8}", path.name, re.ASCII)


def test_arena_is_created_and_opened_again(path: Path) -> None:
    with pytest.raises(MissingFileError, match="there is no arena"):
        open_arena(path)
    for _ in range(2):
        assert create_arena(path) == open_arena(path) == Arena(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_permissions_do_not_depend_on_the_umask(path: Path) -> None:
    for mask in (0, 0o077):
        before = os.umask(mask)
        try:
            arena, lock = join_arena(path)
            with lock:
                assert stat.S_IMODE(path.stat().st_mode) == 0o700
                for file in (arena.wake, arena.workers_lock):
                    assert stat.S_IMODE(file.stat().st_mode) == 0o600
        finally:
            os.umask(before)
        assert remove_arena(path)


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o500])
def test_a_directory_that_others_may_use_is_refused(path: Path, mode: int) -> None:
    path.mkdir()
    path.chmod(mode)
    for use in (open_arena, create_arena, join_arena, remove_arena):
        with pytest.raises(CheckpointError, match=rf"{path}: has mode {mode:o}, expected 700; its content may belong"):
            use(path)
    assert list(path.iterdir()) == []


def test_link_or_file_in_place_of_an_arena_is_refused(path: Path, tmp_path: Path) -> None:
    victim = create_arena(tmp_path / "victim").root
    (victim / "file").write_text("")
    path.symlink_to(victim)
    for use in (open_arena, create_arena, join_arena, remove_arena):
        with pytest.raises(CheckpointError, match=r": is a symbolic link; .*name another checkpoint\.arena_directory"):
            use(path)
    assert [file.name for file in victim.iterdir()] == ["file"]
    path.unlink()
    path.write_text("")
    for use in (open_arena, create_arena, remove_arena):
        with pytest.raises(CheckpointError, match=": is not a directory;"):
            use(path)


def test_a_directory_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_arena(path)
    ours = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
    for use in (open_arena, create_arena, join_arena, remove_arena):
        with pytest.raises(CheckpointError, match=f"belongs to user {ours}, and this is user {ours + 1}"):
            use(path)


def test_parent_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    open_place = tmp_path / "open"
    open_place.mkdir()
    open_place.chmod(0o777)
    with pytest.raises(CheckpointError, match=r"open: every user may replace files in it \(mode 777, not sticky\)"):
        create_arena(open_place / "arena")
    open_place.chmod(0o1777)
    create_arena(open_place / "arena")


def test_arena_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone/arena: the arena cannot be created: No such file.*arena_dir"):
        create_arena(tmp_path / "gone" / "arena")
    with pytest.raises(CheckpointError, match="the arena cannot be created: File name too long"):
        join_arena(tmp_path / ("a" * 300))


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


def test_sealed_snapshots_are_found_by_rank(arena: Arena, put: Put) -> None:
    put(4, 20, 10)
    put(5, 20, 30)
    put_slot(arena.copy(9, 1), 9, 1, 30)
    assert sealed_by_rank(arena, is_copy=True) == {9: [SealedSnapshot(30, 2, 3)]}
    assert sealed_by_rank(arena) == {
        4: [SealedSnapshot(10, 2, 1), SealedSnapshot(20, 2, 2)],
        5: [SealedSnapshot(20, 2, 2), SealedSnapshot(30, 2, 3)],
    }


def test_slot_of_another_or_no_snapshot_does_not_count(arena: Arena, put: Put) -> None:
    put(4, 20)
    others: tuple[dict[str, int], ...] = (
        {"state": SlotState.WRITING}, {"state": SlotState.EMPTY}, {"state": 9}, {"round": 3}, {"snapshot": 77},
        {"header_rank": 6},
    )  # fmt: skip
    for changes in others:
        put(5, 20, **changes)
        found = sealed_by_rank(arena)
        assert found[4] == [SealedSnapshot(20, 2, 2)]
        assert found.get(5) != found[4], changes
    put(5, 20, 10)
    os.truncate(arena.slot(5, 0), HEADER_BYTES)
    assert sealed_by_rank(arena)[5] == [SealedSnapshot(10, 2, 1)]
