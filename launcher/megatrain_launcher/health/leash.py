"""The probe's side of `child`: it ends when the process that started it ends, however that comes about."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "MEGATRAIN_PROBE_PARENT"
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends; leave at once where that has happened already."""
    if not sys.platform.startswith("linux"):
        return
    expected = parent if parent is not None else int(os.environ.get(PARENT_VARIABLE, os.getppid()))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected:
        os._exit(1)
