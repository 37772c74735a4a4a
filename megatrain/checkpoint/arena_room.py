"""Whether the snapshots of all ranks of a host fit into its memory, with the arithmetic where they do not.

It is asked before anything is made: a store into a full tmpfs would kill the worker.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain.comm.host_groups import HostGroups
from megatrain.contracts.arena import Arena
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.texts import bytes_text

_SPARE_BYTES = 64 << 20
"""Left free in the arena's file system: black boxes, NCCL and data loaders want some of it."""


@dataclass(frozen=True, slots=True)
class RoomNeeded:
    """What one rank's snapshots take beyond what is there already: its own, and its copies for a peer."""

    own_bytes: int
    copy_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.own_bytes + self.copy_bytes


def check_room(
    arena: Arena,
    hosts: Sequence[str],
    needed: RoomNeeded,
    num_slots: int,
    rank: int,
    host: HostGroups,
    *,
    leaving_bytes: int = 0,
) -> None:
    """Refuse to go on where the snapshots of a host's ranks would not fit.

    leaving_bytes: what will be free by the time that copies are made.
    Communication: one gather and one broadcast.
    Raises: ConfigError with the arithmetic, the same on every rank.
    """
    free = _free_bytes(arena.root) + leaving_bytes
    gathered = host.gather_json(rank, [needed.own_bytes, needed.copy_bytes, free])
    problem = None
    if gathered is not None:
        problem = room_problem(
            hosts,
            [RoomNeeded(each[0], each[1]) for each in gathered],
            [each[2] for each in gathered],
            num_slots,
            str(arena.root.parent),
        )
    problem = host.broadcast_json(problem)
    if problem is not None:
        raise ConfigError([problem])


def room_problem(
    hosts: Sequence[str], needed: Sequence[RoomNeeded], free: Sequence[int], slots: int, where: str
) -> str | None:
    """Return why the slots of some host's ranks would not fit, with the arithmetic; None when all fit.

    needed, free: by rank, in bytes; ranks of one host see the same memory, the last one to look sees it right.
    """
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, name in enumerate(hosts) if name == host]
        total, available = sum(needed[rank].total_bytes for rank in ranks), max(free[rank] for rank in ranks)
        copies = sum(needed[rank].copy_bytes for rank in ranks)
        if total and total + _SPARE_BYTES > available:
            setting, part, way_out = f"checkpoint.slots={slots}", "", ""
            if copies:
                setting += " with checkpoint.has_peer_copies=true"
                part = f" ({bytes_text(copies)} of it for copies of other hosts' snapshots)"
                way_out = ", has_peer_copies=false"
            return (
                f"{setting}: the {len(ranks)} ranks of host {host} need {bytes_text(total)} more for "
                f"snapshots{part} in {where}, and {bytes_text(_SPARE_BYTES)} are left free, but there are "
                f"{bytes_text(available)}; use checkpoint.slots=1{way_out}, fewer ranks a host, more memory (/dev/shm "
                "is often smaller than RAM), or another checkpoint.arena_directory"
            )
    return None


def _free_bytes(directory: Path) -> int:
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return free
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), free)
    return min(free, available)
