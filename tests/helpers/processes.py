"""What /proc says of processes that a test started."""

from __future__ import annotations

from megatrain.programs.processes import process_stat


def is_running(pid: int) -> bool:
    """Say whether a process is there that is not just waiting for its parent to hear of its end."""
    stat = process_stat(pid)
    return stat is not None and not stat.is_dead
