"""Blocks of files in object storage, kept on a local disk that the processes of a host share.

A block is one file: the CRC-32 of each page (block_sums.py), then the content. A read touches the pages that it needs
and their sums, so it costs as little as a read of a local file. The name of a block's file is a digest of the URL, of
the version of the file behind it, and of the block's number: another version has other blocks. The cache is no more
than a copy: a block that is missing, damaged or cannot be stored is read from the source.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatrain.contracts.files.file_locks import lock, wait_and_lock
from megatrain.contracts.files.whole_files import is_temporary_name, temporary_name
from megatrain.data.block_sums import BLOCK_BYTES as PAGE_BYTES
from megatrain.data.block_sums import SUM_DTYPE, num_blocks

CACHED_BYTES = 8 << 20
"""Size of a block of the cache."""
_MISSES_UNTIL_RETRY = 64
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CacheCounts:
    """What a process did with the cache. `damaged` and `not_stored` are the blocks that were no use."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    not_stored: int = 0
    removed: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a file. `key`: URL and version of the file. `num_bytes`: the last block of a file may be shorter."""

    key: str
    number: int
    num_bytes: int

    @property
    def name(self) -> str:
        return hashlib.sha256(f"{self.key}\n{self.number}".encode()).hexdigest()


class BlockCache:
    """The blocks in a directory, of at most `max_bytes` together. Methods may be called by several threads."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._misses_until_retry = 0
        self._reported: set[str] = set()
        self.counts = CacheCounts()

    def read(self, block: Block, offset: int, num_bytes: int, load: Callable[[int, int], bytes]) -> bytes:
        """Return a range of a block.

        load: returns a range of the block from the source; its errors are raised here.
        """
        found = self._stored(block, offset, num_bytes)
        if found is not None:
            self.counts.hits += 1
            return found
        self.counts.misses += 1
        if self._misses_until_retry > 0:
            # the disk is full: a whole block for each small range would only load the network
            self._misses_until_retry -= 1
            return load(offset, num_bytes)
        with self._locked(block):
            found = self._stored(block, offset, num_bytes)
            if found is None:
                content = load(0, block.num_bytes)
                self._store(block, content)
                found = content[offset : offset + num_bytes]
        return found

    def holds(self, block: Block) -> bool:
        """Return whether the block has a file. Its content is checked when it is read."""
        return self._path(block).exists()

    def _path(self, block: Block) -> Path:
        name = block.name
        return self._directory / name[:2] / name

    def _stored(self, block: Block, offset: int, num_bytes: int) -> bytes | None:
        """Return a range of a block's file; None if there is no file, or if it is damaged there."""
        path = self._path(block)
        first, end = offset // PAGE_BYTES, num_blocks(offset + num_bytes)
        sums_bytes = num_blocks(block.num_bytes) * SUM_DTYPE.itemsize
        try:
            with path.open("rb", buffering=0) as file:
                descriptor = file.fileno()
                if os.fstat(descriptor).st_size == sums_bytes + block.num_bytes:
                    itemsize = SUM_DTYPE.itemsize
                    sums = np.frombuffer(os.pread(descriptor, (end - first) * itemsize, first * itemsize), SUM_DTYPE)
                    start = first * PAGE_BYTES
                    size = min(end * PAGE_BYTES, block.num_bytes) - start
                    content = os.pread(descriptor, size, sums_bytes + start)
                    pages = [content[place : place + PAGE_BYTES] for place in range(0, size, PAGE_BYTES)]
                    if len(content) == size and [zlib.crc32(page) for page in pages] == sums.tolist():
                        os.utime(descriptor)  # the time of the last use, for the removal of old blocks
                        return content[offset - start : offset - start + num_bytes]
                problem = "differs from its checksums"
        except FileNotFoundError:
            return None
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        self.counts.damaged += 1
        self._report("damaged", f"{path} {problem}; it is read from its source again")
        with suppress(OSError):
            path.unlink()
        return None

    def _store(self, block: Block, content: bytes) -> None:
        path = self._path(block)
        sums = [zlib.crc32(content[place : place + PAGE_BYTES]) for place in range(0, len(content), PAGE_BYTES)]
        header = np.array(sums, SUM_DTYPE).tobytes()
        temporary = path.with_name(temporary_name(path.name))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make_room(len(header) + len(content))
            try:
                with temporary.open("wb") as file:
                    file.write(header)
                    file.write(content)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            self.counts.not_stored += 1
            self._misses_until_retry = _MISSES_UNTIL_RETRY
            self._report(
                "not stored",
                f"{path}: cannot be written: {error.strerror}; data are read from their source each time: free space "
                "or change data.cache_dir",
            )

    def _make_room(self, num_bytes: int) -> None:
        """Remove the blocks that were not used for the longest time, until `num_bytes` more fit.

        If another process is removing blocks, nothing is done.
        """
        with (self._directory / "removal.lock").open("ab") as file:
            try:
                lock(file.fileno())
            except BlockingIOError:
                return
            found = sorted((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path) for entry in self._files())
            total = sum(size for _, size, _ in found)
            for _, size, path in found:
                if total + num_bytes <= self._max_bytes:
                    break
                Path(path).unlink(missing_ok=True)
                self.counts.removed += 1
                total -= size

    def _files(self) -> Iterator[os.DirEntry[str]]:
        for folder in os.scandir(self._directory):
            if folder.is_dir():
                yield from (entry for entry in os.scandir(folder.path) if not is_temporary_name(entry.name))

    @contextmanager
    def _locked(self, block: Block) -> Iterator[None]:
        """Let one process at a time read a block from its source, and the others wait for it.

        Blocks share 256 locks. Without locks, or with a full disk, several processes may read the same block.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            file = (self._directory / f"{block.name[:2]}.lock").open("ab")
        except OSError:
            yield
            return
        with file:
            with suppress(OSError):
                wait_and_lock(file.fileno())
            yield

    def _report(self, kind: str, text: str) -> None:
        """Log the first problem of each kind; the counts have the others."""
        if kind not in self._reported:
            self._reported.add(kind)
            _logger.warning("data.cache_dir: %s", text)
