"""A process that does nothing for a while: what it has written until then can be read as of one moment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain.programs.child_process import ChildProcess

_STOPPED = "TtZX"
_POLL_S = 0.002


@contextmanager
def frozen(child: ChildProcess, timeout_s: float = 5.0) -> Iterator[None]:
    """Have a child stand still during the block; it goes on after it, unless it was killed.

    Raises: TimeoutError when one of its threads does not stop in time, for it waits for a disk.
    """
    child.send(signal.SIGSTOP)
    try:
        deadline = time.monotonic() + timeout_s
        while not _stands_still(child.pid):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {child.pid} does not stand still within {timeout_s:g} s")
            time.sleep(_POLL_S)
        yield
    finally:
        child.send(signal.SIGCONT)


def _stands_still(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task")
    with suppress(FileNotFoundError):
        for name in os.listdir(tasks):
            with suppress(FileNotFoundError, ProcessLookupError):
                if (tasks / name / "stat").read_text().rpartition(")")[2].split()[0] not in _STOPPED:
                    return False
    return True
