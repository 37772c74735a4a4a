"""A process that is stopped for a while, so that its writes can be read as of one moment."""

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
_TIMEOUT_S = 5.0


@contextmanager
def frozen(child: ChildProcess) -> Iterator[None]:
    """Stop a child during the block; it continues afterwards, unless it was killed.

    Raises: TimeoutError when one of its threads does not stop in time because it waits for a disk.
    """
    child.send(signal.SIGSTOP)
    try:
        deadline = time.monotonic() + _TIMEOUT_S
        while not _is_suspended(child.pid):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {child.pid} was not suspended within {_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
        yield
    finally:
        child.send(signal.SIGCONT)


def _is_suspended(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task")
    with suppress(FileNotFoundError):
        for name in os.listdir(tasks):
            with suppress(FileNotFoundError, ProcessLookupError):
                if (tasks / name / "stat").read_text().rpartition(")")[2].split()[0] not in _STOPPED:
                    return False
    return True
