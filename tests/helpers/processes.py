"""The processes that a test started."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from megatrain.programs.processes import process_stat


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    stat = process_stat(pid)
    return stat is not None and not stat.is_dead


def words_of(pid: int) -> list[bytes]:
    """Return the command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


def descendants(pid: int) -> list[int]:
    """Return the processes that `pid` started, and their descendants. A process that has ended, or was waited for, has
    none."""
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found + [below for child in found for below in descendants(child)]


class ChildProcesses:
    """Processes of `multiprocessing` that this process starts after the creation of this object.

    Other tests in the same process may have left running ones: the ranks of the pool that they share.
    """

    def __init__(self) -> None:
        self._before = set(multiprocessing.active_children())

    def running(self) -> set[BaseProcess]:
        return set(multiprocessing.active_children()) - self._before
