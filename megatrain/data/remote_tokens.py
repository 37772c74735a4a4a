"""Tokens in object storage, read through the cache of the host: the counterpart of TokenFile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from megatrain.contracts.errors import DataError
from megatrain.data.block_cache import FileBlock
from megatrain.data.remote_path import RemotePath
from megatrain.data.token_file import UnreadableError, unopened

MOST_THREADS = 16
"""Blocks that a process fetches at the same time."""


class RemoteTokens:
    """A file of tokens behind a URL. `num_bytes` is its size when it was opened. For any number of threads.

    Raises: DataError when it cannot be opened.
    """

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        try:
            self._file = path.file()
        except FileNotFoundError as error:
            raise unopened(path, error) from error
        self.num_bytes = self._file.version.num_bytes
        self._block_bytes = path.cache.settings.block_bytes

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return `num_bytes` bytes from `offset` on.

        Raises: UnreadableError with the first byte that could not be read, after many tries; DataError when the file
        was changed or removed, or access is denied.
        """
        parts = []
        end = min(offset + num_bytes, self.num_bytes)
        for number in self._numbers(offset, end):
            block = self.block(number)
            first = max(offset, block.offset)
            size = min(end, block.offset + block.num_bytes) - first
            try:
                parts.append(self.path.cache.read(block, first - block.offset, size, self._file.read_range))
            except UnreadableError as error:
                raise UnreadableError(first, error.reason) from error
        return b"".join(parts)

    def blocks(self, offset: int, num_bytes: int) -> Iterator[RemoteBlock]:
        """Yield the blocks that a read needs."""
        yield from (RemoteBlock(self, number) for number in self._numbers(offset, offset + num_bytes))

    def block(self, number: int) -> FileBlock:
        start = number * self._block_bytes
        return FileBlock(self._file.key, start, min(self._block_bytes, self.num_bytes - start))

    def fetch(self, number: int) -> None:
        """Copy a block to the cache. If that fails, the read will raise the error."""
        with suppress(DataError, UnreadableError):
            self.path.cache.fetch(self.block(number), self._file.read_range)

    def _numbers(self, offset: int, end: int) -> range:
        return range(offset // self._block_bytes, -(-end // self._block_bytes)) if end > offset else range(0)


@dataclass(frozen=True, slots=True)
class RemoteBlock:
    """A block that a coming step needs."""

    tokens: RemoteTokens
    number: int

    def fetch(self) -> None:
        self.tokens.fetch(self.number)


def fetch_together(blocks: Iterable[RemoteBlock]) -> None:
    """Fetch blocks at the same time, before they are read one after the other."""
    found = list(dict.fromkeys(blocks))
    if len(found) > 1:
        # where no thread can be started, the reads fetch
        with suppress(RuntimeError), ThreadPoolExecutor(min(len(found), MOST_THREADS), "data-fetch") as threads:
            list(threads.map(RemoteBlock.fetch, found))
