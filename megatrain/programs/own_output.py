"""The log of a program that a job starts: lines with time and name, and a new file when its file is removed.

Each of these programs has its own log, to which its output goes. A program at a terminal does not need this.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

_GONE = " (deleted)"
"""The suffix that Linux appends to the name of an open file that was removed."""
_POLL_S = 1.0


def keep_own_log() -> None:
    """Redirect this program's output to a new file of the same name whenever the file is removed, until the program
    ends.
    """
    threading.Thread(target=_keep, name="own log", daemon=True).start()


def log_line(program: str, text: str) -> None:
    """Write a line with the time, the program and its process id to the standard error output. A full disk loses it."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {program} {os.getpid()}: {text}\n"
    with suppress(OSError):
        os.write(2, line.encode(errors="backslashreplace"))


def _keep() -> None:
    while True:
        time.sleep(_POLL_S)
        with suppress(OSError):  # no new file can be created now: the next poll tries again
            _restore_removed()


def _restore_removed() -> None:
    removed = [(handle, path) for handle in (1, 2) if (path := _removed(handle)) is not None]
    for handle, path in removed:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.dup2(new, handle)
        os.close(new)
    if removed:
        print("this log was removed from outside; its earlier content is lost", file=sys.stderr, flush=True)


def _removed(handle: int) -> Path | None:
    """Return the former path of an open regular file that was removed; None for any other. Raises: OSError."""
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink:
        return None
    name = os.readlink(f"/proc/self/fd/{handle}")
    return Path(name.removesuffix(_GONE)) if name.endswith(_GONE) else None
