"""A file in object storage: its version, reads that are repeated while the storage fails, and reads through a cache.

After each read, the version is looked up: if it has not changed since the file was opened, neither have the bytes.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from megatrain.contracts.errors import DataError, UnreachableError
from megatrain.contracts.files.url_drivers import reason
from megatrain.contracts.files.whole_files import MISSING_ERRORS
from megatrain.data.block_cache import BlockCache, FileBlock
from megatrain.data.cache_use import CacheUse
from megatrain.data.input_file import FileVersion, url_version
from megatrain.data.side_by_side import side_by_side

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""The longest pauses before a read is repeated. After these, the storage counts as failed."""
_REFUSALS = (PermissionError, IsADirectoryError, *MISSING_ERRORS)
_Result = TypeVar("_Result")


class RemoteFile:
    """A file behind a URL: `path` in fsspec's driver `store`. For any number of threads.

    `num_bytes`: its size when it was opened. cache: keeps what `read` and `map` have read.
    Raises: FileNotFoundError; DataError when access is denied; UnreachableError when the storage does not answer. All
    reads raise DataError when the file was changed or removed, or access is denied, and UnreachableError.
    """

    def __init__(self, url: str, store: Any, path: str, cache: BlockCache) -> None:
        self._url = url
        self._store = store
        self._path = path
        self._cache = cache
        found = _repeated(url, self._current_version)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
        self._version = found
        self.num_bytes = found.num_bytes

    @property
    def version(self) -> str:
        """The version that was opened."""
        return f"{self.num_bytes} bytes, {self._version.mark}"

    @property
    def cache_use(self) -> CacheUse:
        """What this process read through the cache of the file."""
        return self._cache.use

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes through the cache, as many as the file has from `offset` on, at most `num_bytes`."""
        end, parts = min(offset + num_bytes, self.num_bytes), []
        for _, block in self.blocks(offset, num_bytes):
            first, last = max(offset, block.offset), min(end, block.offset + block.num_bytes)
            parts.append(self._cache.read(block, first - block.offset, last - first, self.read_range))
        return b"".join(parts)

    def blocks(self, offset: int, num_bytes: int) -> list[RemoteBlock]:
        """Return the blocks of the cache that `read` needs for the same range."""
        size, end = self._cache.settings.block_bytes, min(offset + num_bytes, self.num_bytes)
        starts = range(offset - offset % size, end, size) if offset < end else range(0)
        return [RemoteBlock(self, self._block(start, min(size, self.num_bytes - start))) for start in starts]

    def fetch(self, block: FileBlock) -> None:
        """Copy a block to the cache. If that fails, the read will raise the error."""
        with suppress(DataError):
            self._cache.read(block, 0, 0, self.read_range)

    def map(self) -> bytes | mmap.mmap:
        """Return the content of the whole file, which is copied to the cache and mapped."""
        return self._cache.whole(self._block(0, self.num_bytes), self.read_range)

    def read_range(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes from the storage."""
        if num_bytes == 0:
            return b""
        return _repeated(f"{self._url} at byte {offset}", lambda: self._read(offset, num_bytes))

    def _block(self, offset: int, num_bytes: int) -> FileBlock:
        return FileBlock(f"{self._url}\n{self._version.num_bytes}\n{self._version.mark}", offset, num_bytes)

    def _current_version(self) -> FileVersion | None:
        """Return the version that the storage has now; None if the file does not exist."""
        try:
            return url_version(self._store, self._path)
        except MISSING_ERRORS:
            return None

    def _read(self, offset: int, num_bytes: int) -> bytes:
        try:
            content = bytes(self._store.cat_file(self._path, start=offset, end=offset + num_bytes))
        finally:
            # after an error, too: drivers report a range beyond a new end with various errors
            found = self._current_version()
            if found is None:
                raise DataError(f"{self._url}: was removed while it was read; restore it")
            if found != self._version:
                before, now = (f"{version.num_bytes} bytes ({version.mark})" for version in (self._version, found))
                raise DataError(
                    f"{self._url}: was changed while it was read: had {before}, has {now}; restore it, or start again"
                )
        if len(content) != num_bytes:
            raise OSError(errno.EIO, f"{len(content)} of {num_bytes} bytes were received")
        return content


class RemoteBlock(NamedTuple):
    """A block of a file."""

    file: RemoteFile
    block: FileBlock

    def fetch(self) -> None:
        self.file.fetch(self.block)


def fetch_together(blocks: Iterable[RemoteBlock]) -> None:
    """Fetch blocks at the same time, before they are read one after the other."""
    found = list(dict.fromkeys(blocks))
    if len(found) > 1:
        side_by_side(RemoteBlock.fetch, found)


def _repeated(what: str, action: Callable[[], _Result]) -> _Result:
    """Return the result of an action, which is repeated while the storage fails.

    Raises: DataError naming `what` when access is denied; UnreachableError naming it after the last try.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            return action()
        except DataError:
            raise
        except Exception as error:
            # the SDKs' errors are known here only by name: NoCredentialsError, CredentialRetrievalError
            if isinstance(error, _REFUSALS) or "Credential" in type(error).__name__:
                raise DataError(f"{what}: cannot be read: {reason(error)}; {_refusal_hint(error)}") from error
            if pause_s is None:
                raise UnreachableError(
                    f"{what}: cannot be read, after {len(PAUSES_S) + 1} tries: {reason(error)}; check the network and "
                    "the storage"
                ) from error
        # requests of all hosts fail at the same time; different pauses keep them from returning all at once
        time.sleep(pause_s * random.uniform(0.5, 1.0))
    raise AssertionError("the last try returns or raises")


def _refusal_hint(error: Exception) -> str:
    hint = "check URL and credentials"
    if isinstance(error, PermissionError):
        # to a client that may not list, S3 does not reveal whether an object exists
        return f"{hint}; without the permission to list (s3:ListBucket), a missing object is answered like this, too"
    return hint
