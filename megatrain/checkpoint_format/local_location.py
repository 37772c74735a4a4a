"""Locations of checkpoints on a local disk, or on any other file system that this machine has mounted."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint_format.location import Location, Sink, is_relative_name
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.files.file_locks import give_name
from megatrain.contracts.files.whole_files import MISSING_ERRORS, is_temporary_name, sync_directory, temporary_name

_MAX_READ_BYTES = 2**30
"""The largest file to read whole: far above the largest metadata that megatrain writes."""


@dataclass(frozen=True, slots=True)
class LocalLocation:
    """A path of a file system that this machine has mounted."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> LocalLocation:
        if not is_relative_name(name):
            raise CheckpointError(f"{self}: {name!r} is not a relative path without '..' below it")
        return LocalLocation(self.path / name)

    def entries(self) -> list[Location]:
        with _naming(self.path, "cannot be listed"):
            try:
                names = os.listdir(self.path)
            except FileNotFoundError:
                return []
        # temporary files of failed writes do not count
        return [LocalLocation(self.path / name) for name in sorted(names) if not is_temporary_name(name)]

    def exists(self) -> bool:
        return self._status() is not None

    def size(self) -> int | None:
        status = self._status()
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def _status(self) -> os.stat_result | None:
        with _naming(self.path, "cannot be looked up"):
            try:
                return self.path.stat()
            except MISSING_ERRORS:
                return None

    def read(self) -> bytes:
        with _naming(self.path, "cannot be read", MissingFileError), open(_open_to_read(self.path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MAX_READ_BYTES:
                raise CheckpointError(f"{self}: {size} bytes, and at most {_MAX_READ_BYTES} are read; it is damaged")
            return file.read()

    def read_range(self, offset: int, num_bytes: int) -> bytearray:
        with _naming(self.path, "cannot be read", MissingFileError):
            file = _open_to_read(self.path)
            try:
                end, size = offset + num_bytes, os.fstat(file).st_size
                # check first: an invented length must not become the size of a buffer
                if end > size:
                    raise CheckpointError(
                        f"{self}: {size} bytes, but bytes {offset} to {end} were requested; the file is cut short"
                    )
                content, num_read = bytearray(num_bytes), 0
                # the kernel returns at most 2 GiB per call
                with memoryview(content) as view:
                    while num_read < num_bytes and (part := os.preadv(file, [view[num_read:]], offset + num_read)):
                        num_read += part
            finally:
                os.close(file)
        if num_read < num_bytes:
            raise CheckpointError(f"{self}: was cut short while bytes {offset} to {end} were read")
        return content

    def write(self, content: bytes) -> None:
        with self._written(content) as temporary:
            temporary.replace(self.path)

    def write_new(self, content: bytes) -> bool:
        with self._written(content) as temporary:
            is_new = give_name(temporary, self.path)
            temporary.unlink(missing_ok=True)
        return is_new

    def is_exclusive(self) -> bool:
        first, second = (self.path / temporary_name("exclusive") for _ in range(2))
        try:
            _make_directory(self.path)
            first.touch()
            os.link(first, second)
        except OSError:
            return False
        finally:
            for path in (first, second):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        return True

    @contextmanager
    def _written(self, content: bytes) -> Iterator[Path]:
        """Yield a durable temporary file for the block to move into place. The move is durable after the block."""
        temporary = self.path.with_name(temporary_name(self.name))
        try:
            with _naming(self.path, "cannot be written"):
                _make_directory(self.path.parent)
                with temporary.open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                yield temporary
                # the new name is on disk only after its directory is synced
                sync_directory(self.path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def create(self) -> Sink:
        with _naming(self.path, "cannot be written"):
            _make_directory(self.path.parent)
            # a superseded process that has the old file open must keep writing to that file, not to the new one
            self.path.unlink(missing_ok=True)
            return _LocalSink(self.path)

    def remove(self) -> None:
        with _naming(self.path, "cannot be removed"):
            try:
                if stat.S_ISDIR(self.path.lstat().st_mode):
                    _remove_tree(self.path)
                else:
                    self.path.unlink(missing_ok=True)
                sync_directory(self.path.parent)
            except MISSING_ERRORS:
                return


class _LocalSink:
    """Writes under the final name: no COMMIT covers a partly written file.

    Whole pages bypass the page cache as long as the file system supports that. Then the CPUs copy nothing, and
    pages that are not read soon do not fill memory that a training job needs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._is_open = True
        self._is_direct = self._try_direct(os.O_DIRECT)

    def write(self, buffer: bytes | bytearray | memoryview) -> None:
        self._check_open()
        with _naming(self._path, "cannot be written"), memoryview(buffer) as view, view.cast("B") as rest:
            num_written = 0
            # the kernel writes at most 2 GiB per call, and less when the disk becomes full
            while num_written < len(rest):
                num_written += self._write_some(rest[num_written:])

    def _write_some(self, rest: memoryview) -> int:
        try:
            return os.write(self._file, rest)
        except OSError as error:
            if not self._is_direct or error.errno != errno.EINVAL:
                raise
        # the buffer is not whole pages or not page-aligned: at the end of a file, or from a caller without alignment
        self._try_direct(0)
        self._is_direct = False
        return os.write(self._file, rest)

    def _try_direct(self, flag: int) -> bool:
        """Switch O_DIRECT, which bypasses the page cache, on (O_DIRECT) or off (0). Returns whether that succeeded."""
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT | flag)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._check_open()
        self._is_open = False
        try:
            with _naming(self._path, "cannot be written"):
                try:
                    os.fsync(self._file)
                finally:
                    os.close(self._file)
                sync_directory(self._path.parent)
        except CheckpointError:
            # after a failed fsync, the content on disk is unknown
            self._unlink()
            raise

    def abort(self) -> None:
        if self._is_open:
            self._is_open = False
            self._unlink()
            with suppress(OSError):
                os.close(self._file)

    def _unlink(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError(f"{self._path} is closed")


def _open_to_read(path: Path) -> int:
    """Open a regular file. Opening a FIFO of this name without O_NONBLOCK could block forever."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return file
    os.close(file)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


@contextmanager
def _naming(path: Path, failure: str, missing: type[CheckpointError] = CheckpointError) -> Iterator[None]:
    """Turn an error of the operating system into one that names the file and the failed action."""
    try:
        yield
    except OSError as error:
        # the error may concern a file inside a tree, or a directory above it
        culprit = Path(error.filename or path)
        at = "" if culprit == path or is_temporary_name(culprit.name) else f" ({culprit})"
        kind = missing if isinstance(error, MISSING_ERRORS) else CheckpointError
        raise kind(f"{path}: {failure}: {error.strerror or error}{at}") from error


def _make_directory(path: Path) -> None:
    """Create a directory and those above it, each durably."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def _remove_tree(path: Path) -> None:
    """Remove a directory, even while another process removes it too: already removed entries are ignored."""
    with suppress(FileNotFoundError):
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    _remove_tree(Path(entry.path))
                else:
                    Path(entry.path).unlink(missing_ok=True)
        path.rmdir()
