"""Shared memory that is read-only, full, or as small as a container's: no black box, and one message of the arena."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megatrain.arena.capacity import MemoryNeeded, capacity_problem, free_memory_bytes
from megatrain.arena.directory import create_arena
from megatrain.arena.slot_file import make_slot
from megatrain.arena.slot_layout import SlotHeader
from megatrain.contracts.errors import CheckpointError
from megatrain.run_files.run_directory import own_box_paths
from megatrain.telemetry.recorder import open_recorder
from tests.helpers.small_disk import SmallDisk, small_disk
from tests.unit.telemetry.conftest import IDENTITY

HEADER = SlotHeader(0, 0, 2, 32 << 20, bytes(32))


def num_boxes(disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> tuple[int, str]:
    """Open a rank's recorder; return the number of its black boxes and its only warning, or ""."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        recorder = open_recorder(IDENTITY, directory=str(disk.seen), run_key="key", num_records=256)
    found = len(own_box_paths(disk.seen))
    recorder.set_step(1)
    recorder.complete_step()
    recorder.close()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) <= 1
    return found, "".join(texts)


def test_read_only_shared_memory_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "shm", 64 << 20) as disk:
        arena = create_arena(disk.seen / "arena")
        disk.make_read_only()
        reason = "Read-only file system"
        assert num_boxes(disk, caplog)[0] == 0
        assert reason in num_boxes(disk, caplog)[1]
        with pytest.raises(CheckpointError, match=f"other: the arena cannot be created: {reason}; name another"):
            create_arena(disk.seen / "other")
        with pytest.raises(CheckpointError, match=f"the slot cannot be created: {reason}"):
            make_slot(arena.root / "slot", HEADER)


def test_full_shared_memory_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "shm", 16 << 20) as disk:
        arena = create_arena(disk.seen / "arena")
        disk.fill()
        boxes, warning = num_boxes(disk, caplog)
        assert boxes == 0
        assert "0 bytes are free" in warning
        with pytest.raises(CheckpointError, match=r"has no space for a slot of 3.* bytes; give it more memory"):
            make_slot(arena.root / "slot", HEADER)
        assert list(arena.root.glob("*slot*")) == []


def test_a_containers_64_mb_hold_a_black_box_and_no_arena(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "shm", 64 << 20) as disk:
        assert num_boxes(disk, caplog) == (1, "")
        problem = capacity_problem(["a"], [MemoryNeeded(1 << 20)], [free_memory_bytes(disk.seen)], 2, "/dev/shm")
        assert problem is not None
        assert "1.05 MB more for snapshots in /dev/shm, and 67.1 MB must stay free, but only" in problem
