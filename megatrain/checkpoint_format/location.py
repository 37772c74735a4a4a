"""A location for checkpoints: a tree of files, on a local disk or in an object store.

Location has only the operations that both support: no rename and no lock. Readers see only complete writes: a small
file appears with all of its content or not at all, and a big one counts only when a COMMIT covers it (commit.py). When
`write`, `write_new`, `Sink.close` or `remove` return, a power failure cannot undo their effect. Of several processes
that call `write_new` for one file, exactly one succeeds (but see `Location.is_exclusive`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from megatrain.contracts.errors import CheckpointError, MissingFileError


def is_relative_name(text: str) -> bool:
    """Return whether `text` names something below a location: a/b, but not /a, a/../b, a//b or an impossible name."""
    if "\0" in text or any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        return False
    return all(part not in ("", ".", "..") for part in text.split("/"))


class Sink(Protocol):
    """A new file that is written from beginning to end. The caller finishes it with `close` or with `abort`."""

    def write(self, buffer: bytes | bytearray | memoryview) -> None:
        """Append all bytes of a contiguous buffer. The caller may reuse the buffer afterwards.

        Raises: CheckpointError naming the file.
        """
        ...

    def close(self) -> None:
        """Make the file durable and visible.

        Raises: CheckpointError naming the file; the file is removed then.
        """
        ...

    def abort(self) -> None:
        """Close and remove the file. After `close` or another `abort`, this does nothing."""
        ...


class Location(Protocol):
    """A file or directory of a tree, existing or not. Every method raises CheckpointError naming it and the reason."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        ...

    def __truediv__(self, name: str) -> Location:
        """Return the location `name` below this one; `name` must pass `is_relative_name`."""
        ...

    def __str__(self) -> str:
        """Return the path or URL, for messages."""
        ...

    def entries(self) -> list[Location]:
        """Return the direct children, files and directories, by name; empty when the location does not exist."""
        ...

    def exists(self) -> bool:
        """Return whether there is a file or directory."""
        ...

    def size(self) -> int | None:
        """Return the size of a file in bytes; None when there is no file."""
        ...

    def read(self) -> bytes:
        """Return the whole content of a file.

        Raises: MissingFileError when it is not there.
        """
        ...

    def read_range(self, offset: int, num_bytes: int) -> bytearray:
        """Return exactly `num_bytes` bytes of a file, in memory that the caller may change.

        Raises: MissingFileError when it does not exist; CheckpointError when it is too short.
        """
        ...

    def write(self, content: bytes) -> None:
        """Create or replace a small file atomically, with the directories above it."""
        ...

    def write_new(self, content: bytes) -> bool:
        """Create a small file as `write` does, unless the name exists. Returns whether this call created it.

        After an error it is unknown whether the file was written: see `put_once`.
        """
        ...

    def is_exclusive(self) -> bool:
        """Test whether storage lets only one of several processes create a file below this directory.

        If not, `write_new` checks for the file and then writes: several processes can pass the check, and the last
        write remains. Also False when nothing can be written.
        """
        ...

    def create(self) -> Sink:
        """Begin a big file, with the directories above it. It replaces any file of that name."""
        ...

    def remove(self) -> None:
        """Remove a file, or a directory with all its content. Does nothing if there is none."""
        ...


def put_once(location: Location, content: bytes) -> bool:
    """Create a file that is written only once. Returns whether it has `content`, which must differ for each writer.

    After an error, the file is read back, and its content shows whether this process wrote it.
    Raises: CheckpointError when the file could not be written. It may still appear later, if storage did not answer.
    """
    try:
        if location.write_new(content):
            return True
    except CheckpointError:
        with suppress(CheckpointError):
            return location.read() == content
        raise
    with suppress(MissingFileError):  # another process has removed it meanwhile
        return location.read() == content
    return False
