"""Check whether the snapshots of all ranks of a host fit into its memory, and explain with numbers if they do not.

Callers check before they create any file, because a store into a full tmpfs would kill the worker.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain.formatting import bytes_text, count_text

_SPARE_BYTES = 64 << 20
"""Bytes to leave free in the arena's file system, because black boxes, NCCL and data loaders use it too."""


@dataclass(frozen=True, slots=True)
class MemoryNeeded:
    """The memory that a rank's missing slots need: those of its own snapshots, and those of a peer's copies."""

    own_bytes: int
    copy_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.own_bytes + self.copy_bytes


def capacity_problem(
    hosts: Sequence[str], needed: Sequence[MemoryNeeded], free: Sequence[int], slots: int, where: str
) -> str | None:
    """Return an error message for the first host whose memory cannot hold the slots of its ranks; None when all fit.

    needed, free: by rank, in bytes. Ranks of one host see the same memory; the largest value of `free` counts.
    """
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, name in enumerate(hosts) if name == host]
        total, available = sum(needed[rank].total_bytes for rank in ranks), max(free[rank] for rank in ranks)
        copies = sum(needed[rank].copy_bytes for rank in ranks)
        if total and total + _SPARE_BYTES > available:
            setting, part, hint = f"checkpoint.slots={slots}", "", ""
            if copies:
                setting += " with checkpoint.has_peer_copies=true"
                part = f" ({bytes_text(copies)} of it for copies of other hosts' snapshots)"
                hint = ", has_peer_copies=false"
            return (
                f"{setting}: host {host} with {count_text(len(ranks), 'rank')} needs {bytes_text(total)} more for "
                f"snapshots{part} in {where}, and {bytes_text(_SPARE_BYTES)} must stay free, but only "
                f"{bytes_text(available)} are free; use checkpoint.slots=1{hint}, fewer ranks a host, more memory "
                "(/dev/shm is often smaller than RAM), or another checkpoint.arena_directory"
            )
    return None


def free_memory_bytes(directory: Path) -> int:
    """Return the bytes that a new file on tmpfs may use: what is free in the file system or available in memory,
    whichever is less."""
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return free
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), free)
    return min(free, available)
