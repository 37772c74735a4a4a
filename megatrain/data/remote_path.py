"""Paths of data files that may be URLs: fsspec's s3://, gs://, hdfs://, file:// and others.

A RemotePath has the parts of pathlib.Path that the readers of data files use, with the same errors.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar, cast

from megatrain.contracts.errors import DataError
from megatrain.contracts.files.url_drivers import driver, reason, split_url
from megatrain.data.block_cache import BlockCache, CacheSettings
from megatrain.data.input_file import url_file, url_version
from megatrain.data.remote_file import RemoteFile


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A URL, fsspec's driver for it, and the cache for what is read of it."""

    url: str
    store: Any = field(repr=False)
    cache: BlockCache = field(repr=False)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rpartition("/")[0], self.store, self.cache)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}", self.store, self.cache)

    def absolute(self) -> RemotePath:
        return self

    def exists(self) -> bool:
        """Raises: DataError when the storage does not answer."""
        try:
            self.file()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Raises: DataError when the storage does not answer."""
        try:
            return bool(self.store.isdir(self._path))
        except Exception as error:
            raise DataError(f"{self}: cannot be read: {reason(error)}; check URL and credentials") from error

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield the files of this folder whose names match. Raises: DataError when it cannot be listed."""
        try:
            self.store.invalidate_cache()
            names = [str(path).rstrip("/").rpartition("/")[2] for path in self.store.ls(self._path, detail=False)]
        except FileNotFoundError:
            return
        except Exception as error:
            raise DataError(f"{self}: cannot be listed: {reason(error)}") from error
        yield from (self / name for name in names if fnmatchcase(name, pattern))

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open the file at its source, to be read once from start to end. Raises: OSError."""
        return cast(io.BufferedReader, url_file(self.url, self.store, self._path).open(mode))

    def read_bytes(self) -> bytes:
        """Read a small file from its source. Raises: OSError, DataError."""
        file = self.file()
        return file.read_range(0, file.num_bytes)

    def read_text(self, encoding: str) -> str:
        return self.read_bytes().decode(encoding)

    def look_up(self) -> None:
        """Ask the storage for the file once. Raises: the driver's errors, such as FileNotFoundError."""
        url_version(self.store, self._path)

    def file(self) -> RemoteFile:
        """Open the file. Raises: FileNotFoundError; DataError when it cannot be looked up."""
        return RemoteFile(self.url, self.store, self._path, self.cache)

    @property
    def _path(self) -> str:
        return str(self.store._strip_protocol(self.url))


DataPath = Path | RemotePath
AnyPath = TypeVar("AnyPath", Path, RemotePath, Path | RemotePath)


def path_or_url(text: str, cache: CacheSettings) -> DataPath:
    """Return the path, or the URL, of data files.

    Raises: DataError when a URL has a password or no driver, or the cache cannot be used.
    """
    found = split_url(text, DataError)
    return Path(text) if found is None else RemotePath("://".join(found), driver(text, DataError), BlockCache(cache))


def appended(path: AnyPath, ending: str) -> AnyPath:
    """Return a path with `ending` after its name."""
    return path.parent / f"{path.name}{ending}"


def matching(folder: DataPath, pattern: str) -> list[DataPath]:
    """Return the files of a folder whose names match, sorted. Raises: DataError when a URL cannot be listed."""
    return sorted(folder.glob(pattern), key=str)
