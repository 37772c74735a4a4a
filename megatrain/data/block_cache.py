"""Parts of files in object storage, kept on a local disk that the processes of a host share.

A block is one file: the CRC-32 of each page (block_sums.py), then the content. A read touches the pages that it needs
and their sums, so it costs as little as a read of a local file. A whole file is mapped, so it has no sums, and it stays
while a process maps it. Names are digests of the URL, of the version of the file behind it, and of the range: another
version has other blocks. The cache is no more than a copy: what is missing, damaged or cannot be stored is read from
the source.

A file gets its name when it is complete. The kernel releases the locks of a killed process, and making room removes
temporary files without a lock. The file `total` has a number that is at least the bytes of all blocks and whole
files; making room counts them again.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from megatrain.config.data import DataConfig
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.file_locks import lock, wait_and_lock, wait_and_lock_byte, wait_and_share
from megatrain.contracts.files.own_files import check_own_directory, make_own_directory
from megatrain.contracts.files.whole_files import MISSING_ERRORS, is_temporary_name, temporary_name
from megatrain.data.block_sums import BLOCK_BYTES as PAGE_BYTES
from megatrain.data.block_sums import SUM_DTYPE, num_blocks, sums_of
from megatrain.data.cache_use import CacheCounter, CacheUse, Load

_PART_BYTES = 8 << 20
"""A whole file is loaded in parts of this size."""
_MISSES_UNTIL_RETRY = 64
"""After a block could not be stored, this many reads of missing blocks go to the source before the next attempt to
store one."""
_WHOLE = ".whole"
_ROOM = 8
"""Making room frees at least 1/8 of the cache, so that it is rare: it looks at all files."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Where a cache is, its largest size, and the size of its blocks. directory: "" means the default."""

    directory: str
    max_bytes: int
    block_bytes: int

    @classmethod
    def of(cls, config: DataConfig) -> Self:
        return cls(config.cache_directory, config.cache_bytes, config.cache_block_bytes)

    @property
    def resolved_directory(self) -> Path:
        """The directory of this user's cache."""
        # /tmp is often in memory, and /var/tmp is not
        above = self.directory or os.environ.get("TMPDIR") or "/var/tmp"
        return Path(above).absolute() / f"megatrain-data-{os.geteuid()}"


@dataclass(frozen=True, slots=True)
class FileBlock:
    """A range of a file. `key`: URL and version of the file."""

    key: str
    offset: int
    num_bytes: int

    @property
    def name(self) -> str:
        return hashlib.sha256(f"{self.key}\n{self.offset}\n{self.num_bytes}".encode()).hexdigest()


class BlockCache:
    """The files in a directory, of at most `max_bytes` together. Methods may be called by several threads.

    Raises: DataError when the directory cannot be made, or is not this user's alone.
    """

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self._directory = settings.resolved_directory
        self._misses_until_retry = 0
        self._reported: set[str] = set()
        self._counter = CacheCounter()
        try:
            self._directory.parent.mkdir(parents=True, exist_ok=True)
            make_own_directory(self._directory)
            check_own_directory(self._directory)
        except OSError as error:
            raise DataError(
                f"{self._directory}: cannot be used as the cache of remote data: {error.strerror}; set "
                "data.cache_directory to a directory on a local disk"
            ) from error

    @property
    def use(self) -> CacheUse:
        """What this process read through this cache."""
        return self._counter.use

    def read(self, block: FileBlock, offset: int, num_bytes: int, load: Load) -> bytes:
        """Return a range of a block. A range of 0 bytes only stores the block.

        load: returns a range of the file from the source. Its errors, which are no OSErrors, are raised here.
        """
        found, load = self._stored(block, offset, num_bytes), self._counter.counted(load)
        if found is not None:
            return found
        if self._misses_until_retry > 0:
            # the disk is full: a whole block for each small range would only load the network
            self._misses_until_retry -= 1
            return load(block.offset + offset, num_bytes)
        with self._locked(block):
            found = self._stored(block, offset, num_bytes)
            if found is None:
                content = load(block.offset, block.num_bytes)
                header = np.array(sums_of(content), SUM_DTYPE).tobytes()
                self._store(self._path(block), len(header) + len(content), (header, content))
                found = content[offset : offset + num_bytes]
        return found

    def whole(self, block: FileBlock, load: Load) -> bytes | mmap.mmap:
        """Return a whole file: mapped if it can be stored, otherwise in memory. The map outlives the file."""
        path, load = self._path(block).with_suffix(_WHOLE), self._counter.counted(load)

        def parts() -> Iterator[bytes]:
            for start in range(0, block.num_bytes, _PART_BYTES):
                yield load(start, min(_PART_BYTES, block.num_bytes - start))

        with self._locked(block):
            found = _mapped(path, block.num_bytes)
            if found is not None:
                self._counter.add(CacheUse(hit_bytes=block.num_bytes))
            else:
                self._store(path, block.num_bytes, parts())
                found = _mapped(path, block.num_bytes)
        return b"".join(parts()) if found is None else found

    def _path(self, block: FileBlock) -> Path:
        name = block.name
        return self._directory / name[:2] / name

    def _stored(self, block: FileBlock, offset: int, num_bytes: int) -> bytes | None:
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
                    if len(content) == size and sums_of(content) == sums.tolist():
                        self._counter.add(CacheUse(hit_bytes=num_bytes))
                        os.utime(descriptor)  # the time of the last use, for the removal of old blocks
                        return content[offset - start : offset - start + num_bytes]
                problem = "differs from its checksums"
        except MISSING_ERRORS:
            return None
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        self._report("damaged", f"{path} {problem}; it is read from its source again")
        with suppress(OSError):
            path.unlink()
        return None

    def _store(self, path: Path, num_bytes: int, parts: Iterable[bytes]) -> None:
        """Write a file atomically, if there is room. Raises: the errors of `parts`, which are no OSErrors."""
        temporary = path.with_name(temporary_name(path.name))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._reserved(num_bytes, temporary) as descriptor, open(descriptor, "wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                if path.suffix:
                    os.fsync(descriptor)  # without sums, a loss of power must not leave another content
                temporary.replace(path)
        except OSError as error:
            self._misses_until_retry = _MISSES_UNTIL_RETRY
            self._counter.add(CacheUse(num_not_stored=1))
            self._report(
                "not stored",
                f"{path} cannot be written: {error.strerror}; remote data are read from their source each time: free "
                "space, or change data.cache_directory or data.cache_bytes",
            )
        finally:
            with suppress(OSError):
                temporary.unlink()

    @contextmanager
    def _reserved(self, num_bytes: int, temporary: Path) -> Iterator[int]:
        """Make room for a file, create it with its final size, and yield its locked descriptor. Raises: OSError."""
        if num_bytes > self.settings.max_bytes:
            raise OSError(errno.EFBIG, f"its {num_bytes} bytes are more than data.cache_bytes")
        with (self._directory / "total").open("a+b") as total:
            with suppress(OSError):
                wait_and_lock(total.fileno())
            recorded = os.pread(total.fileno(), 32, 0)
            used = int(recorded) if recorded.isdigit() else self.settings.max_bytes
            if used + num_bytes > self.settings.max_bytes:
                used = self._make_room(num_bytes)
            has_room = used + num_bytes <= self.settings.max_bytes
            total.truncate(0)
            total.write(b"%d" % (used + (num_bytes if has_room else 0)))
            total.flush()
            if not has_room:
                raise OSError(errno.ENOSPC, "files that are in use or incomplete take the rest of data.cache_bytes")
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with suppress(OSError):
                    wait_and_lock(descriptor)
                os.ftruncate(descriptor, num_bytes)
            except BaseException:
                os.close(descriptor)
                raise
        yield descriptor

    def _make_room(self, num_bytes: int) -> int:
        """Remove incomplete files of killed processes, then the least recently used files.

        Returns the bytes of the files that remain.
        """
        found, used = [], 0
        for path in self._directory.glob("??/*"):
            with suppress(FileNotFoundError):
                status, is_temporary = path.stat(), is_temporary_name(path.name)
                used += status.st_size
                if not (is_temporary or path.suffix == _WHOLE) or not _is_in_use(path):
                    found.append((not is_temporary, status.st_mtime_ns, status.st_size, path))
        wanted = self.settings.max_bytes - max(num_bytes, self.settings.max_bytes // _ROOM)
        for is_complete, _, size, path in sorted(found):
            if used <= wanted:
                break
            path.unlink(missing_ok=True)
            used -= size
            self._counter.add(CacheUse(evicted_bytes=size * is_complete))
        return used

    @contextmanager
    def _locked(self, block: FileBlock) -> Iterator[None]:
        """Let one process at a time read a block from its source; the other processes wait.

        A read may be repeated for a minute, so each block has its own lock: a byte of a file. Without locks, or with a
        full disk, several processes may read the same block.
        """
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            file = (self._directory / "locks").open("ab")
        except OSError:
            yield
            return
        with file:
            with suppress(OSError):
                wait_and_lock_byte(file.fileno(), int(block.name[:15], 16))
            yield

    def _report(self, kind: str, text: str) -> None:
        """Log the first problem of each kind."""
        if kind not in self._reported:
            self._reported.add(kind)
            _logger.warning("cache of remote data: %s", text)


def _mapped(path: Path, num_bytes: int) -> bytes | mmap.mmap | None:
    """Return the content of a file of this size, mapped; None if there is no such file.

    The map has its own descriptor, which shares the lock, so the lock lasts as long as the map.
    """
    if num_bytes == 0:
        return b""
    with suppress(OSError), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == num_bytes:
            os.utime(file.fileno())
            wait_and_share(file.fileno())
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return None


def _is_in_use(path: Path) -> bool:
    """Return whether a process writes or maps a file: a removal would then free nothing."""
    with path.open("rb") as file:
        try:
            has_no_locks = bool(lock(file.fileno()))
        except BlockingIOError:
            return True
    # without locks, a process may still be writing it
    return has_no_locks and is_temporary_name(path.name)
