"""The check that the snapshots of a host's ranks fit into its memory, and its error message."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.arena.capacity import MemoryNeeded, capacity_problem
from megatrain.arena.directory import create_arena
from megatrain.checkpoint.job_peers import check_capacity
from megatrain.comm.cpu_groups import CpuGroups
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.layout import Layout
from tests.helpers.single_rank import simulated_group

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
