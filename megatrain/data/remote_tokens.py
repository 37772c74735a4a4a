"""Tokens in object storage, read through the cache of the host: the counterpart of TokenFile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from megatrain.contracts.errors import DataError
from megatrain.data.block_cache import FileBlock
from megatrain.data.remote_path import RemotePath
from megatrain.data.side_by_side import side_by_side
from megatrain.data.token_file import unopened


class RemoteTokens:
    """A file of tokens behind a URL. `num_bytes` is its size when it was opened. For any number of threads.

    Raises: DataError when it cannot be opened.
    """

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        try:
            self.file = path.file()
        except FileNotFoundError as error:
            raise unopened(path, error) from error
        self.num_bytes = self.file.version.num_bytes
        self._block_bytes = path.cache.settings.block_bytes

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return `num_bytes` bytes from `offset` on.

        Raises: DataError when the file was changed or removed, access is denied, or the storage does not answer.
        """
        parts = []
        end = min(offset + num_bytes, self.num_bytes)
        for number in self._numbers(offset, end):
            block = self.block(number)
            first = max(offset, block.offset)
            size = min(end, block.offset + block.num_bytes) - first
            parts.append(self.path.cache.read(block, first - block.offset, size, self.file.read_range))
        return b"".join(parts)

    def blocks(self, offset: int, num_bytes: int) -> Iterator[RemoteBlock]:
        """Yield the blocks that a read needs."""
        yield from (RemoteBlock(self, number) for number in self._numbers(offset, offset + num_bytes))

    def block(self, number: int) -> FileBlock:
        start = number * self._block_bytes
        return FileBlock(self.file.key, start, min(self._block_bytes, self.num_bytes - start))

    def _numbers(self, offset: int, end: int) -> range:
        return range(offset // self._block_bytes, -(-end // self._block_bytes)) if end > offset else range(0)


@dataclass(frozen=True, slots=True)
class RemoteBlock:
    """A block that a coming step needs."""

    tokens: RemoteTokens
    number: int

    def fetch(self) -> None:
        """Copy the block to the cache. If that fails, the read will raise the error."""
        with suppress(DataError):
            self.tokens.path.cache.fetch(self.tokens.block(self.number), self.tokens.file.read_range)


def fetch_together(blocks: Iterable[RemoteBlock]) -> None:
    """Fetch blocks at the same time, before they are read one after the other."""
    found = list(dict.fromkeys(blocks))
    if len(found) > 1:
        side_by_side(RemoteBlock.fetch, found)
