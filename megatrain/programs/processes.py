"""Processes on Linux: parent-death guard, names, children, members of a process group."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_PROC: Final = Path("/proc")
_DEAD_STATES: Final = "ZX"


def _no_prctl(*_: object) -> int:
    """Replace prctl, which only Linux has."""
    return -1


# looked up once, before any fork: a forked child must not call anything that loads a library
_prctl: Final[Callable[..., int]] = getattr(ctypes.CDLL(None, use_errno=True), "prctl", _no_prctl)


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """Some fields of /proc/<pid>/stat."""

    pid: int
    state: str
    parent: int
    group: int
    session: int

    @property
    def is_dead(self) -> bool:
        """Whether the process is a zombie: it has exited, and its parent has not reaped it."""
        return self.state in _DEAD_STATES


def set_parent_death_signal(number: signal.Signals) -> None:
    """Have Linux send this process a signal when its parent dies: precisely, when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def install_parent_death_guard(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. Exit at once if `parent` has ended already."""
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_process_name(name: str) -> None:
    """Set the name that ps and top show for this process; Linux keeps 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def children() -> list[int]:
    """Return the pids of the main thread's children; empty if the kernel was built without this list."""
    pid = os.getpid()
    try:
        return [int(word) for word in (_PROC / f"{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def process_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process; None if it does not exist."""
    try:
        text = (_PROC / f"{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # the name in parentheses may itself contain spaces and parentheses
    state, parent, group, session = text.rpartition(")")[2].split()[:4]
    return ProcessStat(pid, state, int(parent), int(group), int(session))


def process_state(pid: int) -> str:
    """Return the letter of a process's state in /proc; empty if there is no such process."""
    stat = process_stat(pid)
    return "" if stat is None else stat.state


def living_members(groups: set[int], session: int) -> list[ProcessStat]:
    """Return the processes of `session` that belong to one of the groups and are not dead."""
    found = []
    for name in os.listdir(_PROC):
        stat = process_stat(int(name)) if name.isdigit() else None
        if stat is not None and stat.group in groups and stat.session == session and not stat.is_dead:
            found.append(stat)
    return found
