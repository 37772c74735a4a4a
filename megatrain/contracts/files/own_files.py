"""Directories and files that only this user can change, in directories where every user may write.

/dev/shm is world-writable: any local user can create a directory or a file there before this program does. Only this
user can have written the content of its own directory of mode 0700, as long as no other user can replace the directory.
The functions that open a file follow no link, and check the opened file, because the name may mean another file a
moment later.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path


class NotOwnError(PermissionError):
    """Another user may have written the file; `strerror` explains why."""

    def __init__(self, problem: str, path: Path) -> None:
        super().__init__(errno.EPERM, problem, str(path))


def make_own_directory(path: Path) -> None:
    """Create a directory of mode 0700, unless the name exists. `check_own_directory` checks its owner.

    Raises: NotOwnError when any user may replace it; OSError when it cannot be created.
    """
    above = path.parent.stat()
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(above.st_mode)
        raise NotOwnError(f"every user may replace files in it (mode {mode:o}, not sticky)", path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)


def check_own_directory(path: Path) -> None:
    """Check that a directory belongs to this user, is not a link, and is accessible to no other user.

    Raises: NotOwnError; FileNotFoundError; OSError when it cannot be examined.
    """
    status = path.lstat()
    mode, problem = stat.S_IMODE(status.st_mode), ""
    if not stat.S_ISDIR(status.st_mode):
        problem = "is a symbolic link" if stat.S_ISLNK(status.st_mode) else "is not a directory"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    elif mode & 0o077 or mode & 0o700 != 0o700:
        problem = f"has mode {mode:o}, expected 700"
    if problem:
        raise NotOwnError(problem, path)


def open_own_file(path: Path, flags: int, owners: Collection[int] = ()) -> int:
    """Open a regular file of one of `owners` (empty: this process's user), and return its descriptor.

    Never blocks, not even on a FIFO. Raises: NotOwnError for another user's file, for a link, and for anything that is
    not a regular file; OSError.
    """
    try:
        handle = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOwnError("is a symbolic link", path) from error
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise NotOwnError("is not a regular file", path)
        if status.st_uid not in (owners or (os.geteuid(),)):
            raise NotOwnError(f"belongs to user {status.st_uid}, and this is user {os.geteuid()}", path)
    except BaseException:
        os.close(handle)
        raise
    return handle
