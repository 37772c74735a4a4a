"""A place for checkpoints: a tree of files on a local disk here, in an object store elsewhere.

Location is what both have in common, no more: there is no rename and no lock. What is read back is what was written
whole: a small file appears with all of its content or not at all, and a big one counts only when a manifest and a
COMMIT vouch for it. When `write`, `write_new`, `Sink.close` or `remove` return, a power failure takes nothing of it
back. Of several who `write_new` one file, one wins.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.whole_files import MISSING_ERRORS, is_temporary_name, sync_directory, temporary_name

_MOST_READ_BYTES = 2**30
"""Of a file that is read whole: far above the largest metadata. What is bigger was not made by this program."""
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""What a file system says that has no hard links."""


def is_relative_name(text: str) -> bool:
    """Say whether `text` names something below a place: a/b, but not /a, a/../b, a//b, or what no file is called."""
    if "\0" in text or any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        return False
    return all(part not in ("", ".", "..") for part in text.split("/"))


class Sink(Protocol):
    """A new file that is written from beginning to end. It ends with exactly one of `close` and `abort`."""

    def write(self, buffer: bytes | bytearray | memoryview) -> None:
        """Append all bytes of a contiguous buffer, which may be reused after.

        Raises: CheckpointError naming the file.
        """
        ...

    def close(self) -> None:
        """Make the file durable and visible.

        Raises: CheckpointError naming the file, which is gone then.
        """
        ...

    def abort(self) -> None:
        """Give up: close and remove the file. Nothing happens after `close` or another `abort`."""
        ...


class Location(Protocol):
    """A file or directory of a tree, there or not. Every method raises CheckpointError naming it and the reason."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        ...

    def __truediv__(self, name: str) -> Location:
        """Return what `name` is below this place; `name` must pass `is_relative_name`."""
        ...

    def __str__(self) -> str:
        """Return the path or URL, for messages."""
        ...

    def entries(self) -> list[Location]:
        """Return the direct children, files and directories, by name; none where there is nothing."""
        ...

    def exists(self) -> bool:
        """Say whether there is a file or directory."""
        ...

    def size(self) -> int | None:
        """Return the bytes of a file; None where there is no file."""
        ...

    def read(self) -> bytes:
        """Return a whole file.

        Raises: MissingFileError when it is not there.
        """
        ...

    def read_range(self, offset: int, num_bytes: int) -> bytes:
        """Return exactly `num_bytes` bytes of a file.

        Raises: MissingFileError when it is not there; CheckpointError when it ends before.
        """
        ...

    def write(self, content: bytes) -> None:
        """Replace or make a small file, whole or not at all, with the directories above it."""
        ...

    def write_new(self, content: bytes) -> bool:
        """Make a small file as `write` does, unless there is one of its name; return whether it is this one.

        After an error it is unknown whether the file was put: see `put_once`.
        """
        ...

    def is_exclusive(self) -> bool:
        """Say whether one of several who `write_new` a file below this directory wins, by trying it.

        Where not, they look first, and the last one who saw nothing wins. Also False when nothing can be written.
        """
        ...

    def create(self) -> Sink:
        """Begin a big file, in place of any of that name, with the directories above it."""
        ...

    def remove(self) -> None:
        """Remove a file or a directory with all that it holds; nothing there is fine."""
        ...


def put_once(place: Location, content: bytes) -> bool:
    """Make a file of which there is only ever one; return whether it has `content`, which no other writer writes.

    An answer that was lost changes nothing: what lies there is read again, and says whose it is.
    Raises: CheckpointError when it could not be written. It may yet appear, if the storage took it and did not answer.
    """
    try:
        if place.write_new(content):
            return True
    except CheckpointError:
        with suppress(CheckpointError):
            return place.read() == content
        raise
    with suppress(MissingFileError):  # removed since
        return place.read() == content
    return False


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
            raise CheckpointError(f"{self}: {name!r} is no relative path without '..' below it")
        return LocalLocation(self.path / name)

    def entries(self) -> list[Location]:
        with _naming(self.path, "cannot be listed"):
            try:
                names = os.listdir(self.path)
            except FileNotFoundError:
                return []
        # what a write left behind that never happened is nothing
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
            if size > _MOST_READ_BYTES:
                raise CheckpointError(f"{self}: {size} bytes, at most {_MOST_READ_BYTES} are read; it is damaged")
            return file.read()

    def read_range(self, offset: int, num_bytes: int) -> bytes:
        if offset < 0 or num_bytes < 0:
            raise ValueError(f"{num_bytes} bytes at {offset}")
        parts: list[bytes] = []
        missing = num_bytes
        with _naming(self.path, "cannot be read", MissingFileError):
            file = _open_to_read(self.path)
            try:
                end, size = offset + num_bytes, os.fstat(file).st_size
                # asked first: a length that somebody made up must not become a buffer
                if end > size:
                    raise CheckpointError(
                        f"{self}: {size} bytes, but bytes {offset} to {end} are wanted; it is cut short"
                    )
                # the kernel gives at most 2 GiB a call
                while missing and (part := os.pread(file, missing, end - missing)):
                    parts.append(part)
                    missing -= len(part)
            finally:
                os.close(file)
        if missing:
            raise CheckpointError(f"{self}: was cut short while bytes {offset} to {end} were read")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, content: bytes) -> None:
        with self._written(content) as temporary:
            temporary.replace(self.path)

    def write_new(self, content: bytes) -> bool:
        with self._written(content) as temporary:
            is_new = _link(temporary, self.path)
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
        """Give a durable file of a temporary name to put in place; what was put there is durable after the block."""
        temporary = self.path.with_name(temporary_name(self.name))
        try:
            with _naming(self.path, "cannot be written"):
                _make_directory(self.path.parent)
                with temporary.open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                yield temporary
                # the new name itself is on disk only when the directory is
                sync_directory(self.path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def create(self) -> Sink:
        with _naming(self.path, "cannot be written"):
            _make_directory(self.path.parent)
            # a process that was left behind with the old file open goes on writing into that one, not into ours
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


def _link(temporary: Path, path: Path) -> bool:
    """Give a file another name that nothing has yet; return whether it has it. Raises: OSError."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # all that can be done here is to look first
        if path.exists():
            return False
        temporary.replace(path)
    return True


class _LocalSink:
    """Writes under the final name: what is half written is vouched for by no COMMIT.

    Whole pages go past the page cache as long as the file system takes them. The processors then copy nothing, and
    memory that a training job needs is not filled with pages that are not read soon.
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
            # the kernel takes at most 2 GiB a call, and less of what fills the disk
            while num_written < len(rest):
                num_written += self._write_some(rest[num_written:])

    def _write_some(self, rest: memoryview) -> int:
        try:
            return os.write(self._file, rest)
        except OSError as error:
            if not self._is_direct or error.errno != errno.EINVAL:
                raise
        # not whole pages, or not at a page: the end of a file, or a caller who does not care
        self._try_direct(0)
        self._is_direct = False
        return os.write(self._file, rest)

    def _try_direct(self, flag: int) -> bool:
        """Switch writing past the page cache on (O_DIRECT) or off (0); return whether it could be."""
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
            # after a failed fsync it is unknown what is on disk
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
    """Open a regular file. A FIFO of its name would make us wait for ever."""
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
    """Turn an error of the operating system into one that names the file and what could not be done."""
    try:
        yield
    except OSError as error:
        # a file inside a tree may be the one at fault, or a directory above it
        culprit = Path(error.filename or path)
        at = "" if culprit == path or is_temporary_name(culprit.name) else f" ({culprit})"
        kind = missing if isinstance(error, MISSING_ERRORS) else CheckpointError
        raise kind(f"{path}: {failure}: {error.strerror or error}{at}") from error


def _make_directory(path: Path) -> None:
    """Make a directory and those above it, each of them durable."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def _remove_tree(path: Path) -> None:
    """Remove a directory, also while another process does so: what is gone already is fine."""
    with suppress(FileNotFoundError):
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    _remove_tree(Path(entry.path))
                else:
                    Path(entry.path).unlink(missing_ok=True)
        path.rmdir()
