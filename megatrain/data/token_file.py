"""Open data files: any number of threads read a local file of tokens at any byte; an index, local or remote, is mapped.

Tokens are read and not mapped: if a page of a mapped file cannot be read, or lies beyond the end of a file that was
cut off in the meantime, the kernel ends the process. A read fails with an error, which has the byte.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import weakref
from pathlib import Path

from megatrain.contracts.errors import DataError
from megatrain.data.remote_path import DataPath, RemotePath


class TokenFile:
    """An open file. `num_bytes` and `version` are those of the time when it was opened.

    Raises: DataError when it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)
            found = os.fstat(self._descriptor)
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        except OSError as error:
            raise unopened(path, error) from error
        self.num_bytes = found.st_size
        self.version = _local_version(found)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return `num_bytes` bytes from `offset` on.

        Raises: UnreadableError with the first byte that could not be read.
        """
        # usually one read suffices, and its bytes are not copied: b"" + part is part itself
        content = b""
        while len(content) < num_bytes:
            place = offset + len(content)
            try:
                part = os.pread(self._descriptor, num_bytes - len(content), place)
            except OSError as error:
                raise UnreadableError(place, f"cannot be read: {error.strerror}; copy the file again") from error
            if not part:
                raise UnreadableError(
                    place, f"the file ends before this byte; it had {self.num_bytes} bytes when opened; copy it again"
                )
            content += part
        return content


def map_file(path: DataPath) -> bytes | mmap.mmap:
    """Return the content of a file, mapped. Raises: DataError when it cannot be read."""
    return map_version(path)[0]


def map_version(path: DataPath) -> tuple[bytes | mmap.mmap, str]:
    """Return the content of a file, mapped, and its version. Raises: DataError when it cannot be read."""
    try:
        if isinstance(path, RemotePath):
            remote = path.file()
            return remote.map(), remote.version
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if status.st_size else b""
            return content, _local_version(status)
    except OSError as error:
        raise unopened(path, error) from error


def _local_version(status: os.stat_result) -> str:
    """Return what distinguishes a file of this host from others, and from what it was before a change."""
    return f"{status.st_size} bytes, inode {status.st_ino}, time {status.st_mtime_ns}"


class UnreadableError(Exception):
    """A byte of a file cannot be read. `reason` is the end of a sentence about the file."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset = offset
        self.reason = reason


def unopened(path: object, error: OSError) -> DataError:
    """Return the error about a token file that cannot be opened."""
    return DataError(
        f"{path}: cannot be read: {error.strerror}; give the prefix of a .bin/.idx pair, "
        "such as `megatrain data build` makes"
    )
