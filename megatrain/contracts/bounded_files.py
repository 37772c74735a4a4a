"""Reading a small file of which nobody knows who put it there, or what it is."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return what a regular file holds. Raises: OSError, also for anything else and for more than `most_bytes`.

    A FIFO of its name would make us wait for ever, a device would never end.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        raw = file.read(most_bytes + 1)
    if len(raw) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes >> 20} MiB", str(path))
    return raw
