"""Common parts of atomic writes of small files, and of the detection of missing files, on any kind of storage.

Until it is complete, a file has a temporary name in the same directory. Code that lists a directory skips such names,
because an incomplete write does not count.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from pathlib import Path

from megatrain.contracts.files.file_locks import give_name

MISSING_ERRORS = (FileNotFoundError, NotADirectoryError)
"""The exceptions that mean that a file is missing."""
_TEMPORARY_NAME = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


def temporary_name(name: str) -> str:
    """Return a random name for a file until it is complete."""
    return f".{name}.{secrets.token_hex(4)}.tmp"


def is_temporary_name(name: str) -> bool:
    """Return whether `temporary_name` may have made this name."""
    return _TEMPORARY_NAME.fullmatch(name) is not None


def write_private(path: Path, content: bytes, *, is_new: bool = False) -> None:
    """Write a file atomically that only its user can read.

    Raises: OSError; FileExistsError when `is_new` is set and the file exists.
    """
    temporary = path.with_name(temporary_name(path.name))
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(file, "wb") as stream:
            stream.write(content)
        if not is_new:
            temporary.replace(path)
        elif not give_name(temporary, path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Make a directory's list of files durable: a rename is on disk only after its directory is synced.

    Raises: OSError.
    """
    _sync(path, os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make the content of a closed file durable. Raises: OSError."""
    _sync(path, 0)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems lack this call: a closed file or a changed directory is durable at once
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
