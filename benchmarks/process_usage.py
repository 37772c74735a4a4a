"""The memory and the processor time of a process, as the kernel counts them."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process so far, user and system time of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    """Return the current resident memory of a process, in 10^6 bytes."""
    return _of_status(pid, "VmRSS")


def peak_resident_mb(pid: int) -> float:
    """Return the peak resident memory of a process, in 10^6 bytes."""
    return _of_status(pid, "VmHWM")


def _of_status(pid: int, name: str) -> float:
    line = next(one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6
