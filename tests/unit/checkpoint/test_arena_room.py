"""Whether the snapshots of a host's ranks fit into its memory, and what is said where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.checkpoint.arena_room import RoomNeeded, check_room, room_problem
from megatrain.comm.host_groups import HostGroups
from megatrain.contracts.arena import create_arena
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.layout import Layout
from tests.helpers.lone_rank import simulated_group

GB = 10**9


def own(*sizes: int) -> list[RoomNeeded]:
    return [RoomNeeded(size) for size in sizes]


def test_room_is_counted_by_host() -> None:
    hosts = ["a", "a", "b"]
    assert room_problem(hosts, own(GB, GB, 3 * GB), [3 * GB, 2 * GB, 4 * GB], 2, "/dev/shm") is None
    assert room_problem(hosts, own(0, 0, 0), [0, 0, 0], 2, "/dev/shm") is None
    problem = room_problem(hosts, own(GB, GB, 3 * GB), [3 * GB, 3 * GB, 2 * GB], 2, "/dev/shm")
    assert problem is not None
    assert problem.startswith(
        "checkpoint.slots=2: the 1 ranks of host b need 3 GB more for snapshots in /dev/shm, and 67.1 MB are left "
        "free, but there are 2 GB; use checkpoint.slots=1, fewer ranks"
    )


def test_the_spare_room_counts() -> None:
    assert room_problem(["a"], own(GB), [GB + (64 << 20)], 1, "/dev/shm") is None
    assert room_problem(["a"], own(GB), [GB + (64 << 20) - 1], 1, "/dev/shm") is not None


def test_copies_count_and_are_said() -> None:
    needed = [RoomNeeded(2 * GB, GB), RoomNeeded(2 * GB, 2 * GB)]
    assert room_problem(["a", "a"], needed, [7 * GB + (64 << 20)] * 2, 2, "/dev/shm") is None
    problem = room_problem(["a", "a"], needed, [6 * GB] * 2, 2, "/dev/shm")
    assert problem is not None
    assert problem.startswith(
        "checkpoint.slots=2 with checkpoint.has_peer_copies=true: the 2 ranks of host a need 7 GB more for snapshots "
        "(3 GB of it for copies of other hosts' snapshots) in /dev/shm, and 67.1 MB are left free, but there are "
        "6 GB; use checkpoint.slots=1, has_peer_copies=false, fewer ranks"
    )


def test_a_start_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    arena = create_arena(tmp_path / "arena")
    host = HostGroups({axis: simulated_group(axis, 1, 0) for axis in Layout().grid}, Layout().grid)
    check_room(arena, ["a"], RoomNeeded(1000, 1000), 2, 0, host)
    with pytest.raises(ConfigError, match="need 1000 PB more"):
        check_room(arena, ["a"], RoomNeeded(GB * GB), 2, 0, host)
    # what goes before copies are made is as good as free
    check_room(arena, ["a"], RoomNeeded(GB * GB), 2, 0, host, leaving_bytes=GB * GB + (64 << 20))
