"""What it takes to put a small file in place whole, and to say that something is not there, on any kind of storage.

Until it is complete, a file has a temporary name, beside where it will be. Code that lists a directory skips such
names: a write that never came to its end is nothing.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from pathlib import Path

MISSING_ERRORS = (FileNotFoundError, NotADirectoryError)
"""What the system raises where there is nothing."""
_TEMPORARY_NAME = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


def temporary_name(name: str) -> str:
    """Return what a file is called until it is complete: no two writers choose the same."""
    return f".{name}.{secrets.token_hex(4)}.tmp"


def is_temporary_name(name: str) -> bool:
    """Say whether `temporary_name` may have made this name."""
    return _TEMPORARY_NAME.fullmatch(name) is not None


def write_private(path: Path, content: bytes, *, is_new: bool = False) -> None:
    """Put a file in place whole that its user alone can read.

    Raises: OSError; FileExistsError where it shall be new, and there is one.
    """
    temporary = path.with_name(temporary_name(path.name))
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(file, "wb") as stream:
            stream.write(content)
        if is_new:
            os.link(temporary, path)
        else:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Make durable which files a directory holds: a rename is on disk only when its directory is.

    Raises: OSError.
    """
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    except OSError as error:
        # some network file systems have no such call: their directories are durable at once
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(directory)
