"""The resident memory of a process, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def resident_mb(pid: int) -> float:
    """Return the current resident memory of a process, in 10^6 bytes."""
    return _of_status(pid, "VmRSS")


def peak_resident_mb(pid: int) -> float:
    """Return the peak resident memory of a process, in 10^6 bytes."""
    return _of_status(pid, "VmHWM")


def _of_status(pid: int, name: str) -> float:
    line = next(one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6
