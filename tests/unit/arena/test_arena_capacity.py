"""Whether the snapshots of a host fit into its memory; shared memory that is read-only, full or small."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megatrain.arena.capacity import MemoryNeeded, capacity_problem, free_memory_bytes
from megatrain.arena.directory import create_arena
from megatrain.arena.slot_file import make_slot
from megatrain.arena.slot_layout import SlotHeader
from megatrain.checkpoint.job_peers import check_capacity
from megatrain.comm.cpu_groups import CpuGroups
from megatrain.contracts.errors import CheckpointError, ConfigError
from megatrain.contracts.layout import Layout
from megatrain.run_files.run_directory import own_box_paths
from megatrain.telemetry.recorder import open_recorder
from tests.helpers.single_rank import simulated_group
from tests.helpers.small_disk import SmallDisk, small_disk
from tests.unit.telemetry.conftest import IDENTITY

GB = 10**9


def own(*sizes: int) -> list[MemoryNeeded]:
    return [MemoryNeeded(size) for size in sizes]


def test_memory_is_counted_by_host_with_a_reserve() -> None:
    hosts = ["a", "a", "b"]
    assert capacity_problem(hosts, own(GB, GB, 3 * GB), [3 * GB, 2 * GB, 4 * GB], 2, "/dev/shm") is None
    assert capacity_problem(hosts, own(0, 0, 0), [0, 0, 0], 2, "/dev/shm") is None
    problem = capacity_problem(hosts, own(GB, GB, 3 * GB), [3 * GB, 3 * GB, 2 * GB], 2, "/dev/shm")
    assert problem is not None
    assert problem.startswith(
        "checkpoint.slots=2: host b with 1 rank needs 3 GB more for snapshots in /dev/shm, and 67.1 MB must stay "
        "free, but only 2 GB are free; use checkpoint.slots=1, fewer ranks"
    )
    assert capacity_problem(["a"], own(GB), [GB + (64 << 20)], 1, "/dev/shm") is None
    assert capacity_problem(["a"], own(GB), [GB + (64 << 20) - 1], 1, "/dev/shm") is not None


def test_peer_copies_need_memory_and_are_reported() -> None:
    needed = [MemoryNeeded(2 * GB, GB), MemoryNeeded(2 * GB, 2 * GB)]
    assert capacity_problem(["a", "a"], needed, [7 * GB + (64 << 20)] * 2, 2, "/dev/shm") is None
    problem = capacity_problem(["a", "a"], needed, [6 * GB] * 2, 2, "/dev/shm")
    assert problem is not None
    assert problem.startswith(
        "checkpoint.slots=2 with checkpoint.has_peer_copies=true: host a with 2 ranks needs 7 GB more for snapshots "
        "(3 GB of it for copies of other hosts' snapshots) in /dev/shm, and 67.1 MB must stay free, but only "
        "6 GB are free; use checkpoint.slots=1, has_peer_copies=false, fewer ranks"
    )


def test_start_with_too_little_memory_is_refused(tmp_path: Path) -> None:
    arena = create_arena(tmp_path / "arena")
    along = {axis: simulated_group(axis, 1, 0) for axis in Layout().grid}
    cpu_groups = CpuGroups(along, Layout().grid, along["dp"])
    check_capacity(arena, ["a"], MemoryNeeded(1000, 1000), 2, 0, cpu_groups)
    with pytest.raises(ConfigError, match="needs 1000 PB more"):
        check_capacity(arena, ["a"], MemoryNeeded(GB * GB), 2, 0, cpu_groups)
    # Memory that is released before copies are created counts as free.
    check_capacity(arena, ["a"], MemoryNeeded(GB * GB), 2, 0, cpu_groups, freed_bytes=GB * GB + (64 << 20))


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
