"""Read files of a directory that another user may have created, such as a run to inspect.

The other user controls the content. Through a symbolic link, a program would read and show one of its own user's files;
a FIFO could block it forever; a device, or a file without end, could fill its memory. So below the named directory this
module follows no link, reads only regular files, and reads no more than the given limit. Checks and reads use the same
descriptor, so the file that was checked is the file that is read.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_below(root: Path, name: str, max_bytes: int, *, owner: int | None = None, is_secret: bool = False) -> bytes:
    """Return the content of a regular file below `root`. `name`: its path relative to `root`, without "." and "..".

    `owner`: the file and the directories in between must belong to this user, and only this user may write to them.
    `is_secret`: other users must not be able to read the file either.
    Raises: OSError, which names the path and explains why the file is not read.
    """
    with open(open_below(root, name, owner=owner, is_secret=is_secret), "rb") as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes:,} bytes", str(root / name))
    return raw


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. The file and its directory must not be links. Raises: as `read_below`."""
    return read_below(path.parent.parent, f"{path.parent.name}/{path.name}", max_bytes)


def open_below(root: Path, name: str, *, owner: int | None = None, is_secret: bool = False) -> int:
    """Open a regular file for reading, and return its descriptor. Arguments and errors: as `read_below`."""
    path = root
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        *between, last = name.split("/")
        for part in between:
            path /= part
            below = _opened(directory, part, path, os.O_DIRECTORY)
            os.close(directory)
            directory = below
            _check_owner(os.fstat(directory), path, owner)
        path /= last
        file = _opened(directory, last, path, os.O_NONBLOCK)
    finally:
        os.close(directory)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        _check_owner(status, path, owner)
        if is_secret and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            mode = stat.S_IMODE(status.st_mode)
            raise OSError(errno.EPERM, f"has mode {mode:o}, expected 600 (only its user can read it)", str(path))
    except BaseException:
        os.close(file)
        raise
    return file


def _opened(directory: int, part: str, path: Path, flags: int) -> int:
    if part in ("", ".", ".."):
        raise OSError(errno.EINVAL, "does not name a file below the directory", str(path))
    try:
        return os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=directory)
    except OSError as error:
        if stat.S_ISLNK(_mode(directory, part)):
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed here", str(path)) from error
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error


def _mode(directory: int, part: str) -> int:
    try:
        return os.stat(part, dir_fd=directory, follow_symlinks=False).st_mode
    except OSError:
        return 0


def _check_owner(status: os.stat_result, path: Path, owner: int | None) -> None:
    if owner is None:
        return
    if status.st_uid != owner:
        raise OSError(errno.EPERM, f"belongs to user {status.st_uid}, not to user {owner}", str(path))
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise OSError(errno.EPERM, f"can be written by others than user {owner} (mode {mode:o})", str(path))
