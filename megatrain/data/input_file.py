"""One file of a corpus, on a disk or behind a URL: how it is opened, how far it was read, whether it has changed."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from megatrain.compression import unreadable
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.url_drivers import reason

_BUFFER_BYTES = 1 << 20
_MARKS = (("ETag",), ("etag",), ("generation",), ("mtime", "ino"), ("modificationTime", "fileId"), ("LastModified",),
          ("last_modified",), ("Last-Modified",), ("updated",), ("created",))  # fmt: skip
"""What drivers call the properties of a file that change with its content, the best first."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """The size of a file in bytes, and a text that changes with the content: the modification time, or an ETag."""

    num_bytes: int
    mark: str


class InputFile:
    """A file that is read from start to end. str() returns its path or URL, for errors."""

    def __init__(self, shown: str, open_raw: Callable[[], BinaryIO], look_up: Callable[[], FileVersion]) -> None:
        self._shown = shown
        self._open_raw = open_raw
        self._look_up = look_up
        self._raw: BinaryIO | None = None
        self.name = PurePosixPath(shown).name

    def __str__(self) -> str:
        return self._shown

    @property
    def suffixes(self) -> list[str]:
        """All suffixes of the name, in lower case."""
        return [suffix.lower() for suffix in PurePosixPath(self.name).suffixes]

    @property
    def suffix(self) -> str:
        """The last suffix of the name, in lower case; empty if there is none."""
        return self.suffixes[-1] if self.suffixes else ""

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the stored bytes, without decompression. Raises: OSError."""
        assert mode == "rb", mode
        self._raw = self._open_raw()
        return self._raw

    def position(self) -> int:
        """Return how many stored bytes have been read since the file was last opened; bytes in a decompressor's buffer
        count as read."""
        return 0 if self._raw is None or self._raw.closed else self._raw.tell()

    def version(self) -> FileVersion:
        """Look up the version. Raises: DataError when that fails."""
        try:
            return self._look_up()
        except OSError as error:
            raise unreadable(self, error) from error


def local_file(path: Path) -> InputFile:
    """Return a file of this machine."""

    def look_up() -> FileVersion:
        found = path.stat()
        return FileVersion(found.st_size, str(found.st_mtime_ns))

    return InputFile(str(path), lambda: path.open("rb"), look_up)


def url_file(url: str, store: Any, path: str) -> InputFile:
    """Return a file behind a URL: `path` in the driver `store`."""

    def look_up() -> FileVersion:
        try:
            return url_version(store, path)
        except Exception as error:
            raise DataError(f"{url}: cannot be read: {reason(error)}") from error

    def open_raw() -> BinaryIO:
        with _AsOSError():
            return io.BufferedReader(_DriverFile(store.open(path, "rb")), _BUFFER_BYTES)

    return InputFile(url, open_raw, look_up)


def url_version(store: Any, path: str) -> FileVersion:
    """Ask a store for the version of a file. Raises: the driver's errors."""
    store.invalidate_cache()  # a cached listing may be older
    info = store.info(path)
    if info["type"] == "directory":
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    # an ETag stays when the same content is stored again; a time may also change with the mode of the file
    marks = next((keys for keys in _MARKS if any(info.get(key) for key in keys)), tuple(sorted(info)))
    return FileVersion(int(info["size"]), " ".join(str(info.get(key)) for key in marks))


class _DriverFile(io.RawIOBase):
    """A driver's file. Every error is raised as an OSError, like the errors of a disk."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _AsOSError():
            content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _AsOSError():
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._file.close()
        super().close()


class _AsOSError:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        if isinstance(error, Exception):
            raise OSError(errno.EIO, reason(error)) from error
