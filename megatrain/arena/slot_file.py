"""The file of a slot: create it with reserved memory, read it while its worker may be writing, record the outcome.

Files are read with pread and never mapped, so that a slot that is truncated or removed meanwhile causes an error and
not a SIGBUS. slot_layout.py defines the bytes; sealed.py finds complete snapshots; megatrain.checkpoint fills slots.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from megatrain.arena.slot_layout import (
    HEADER_BYTES,
    Persist,
    SlotHeader,
    SlotWord,
    SlotWords,
    decode_header,
    decode_words,
    encode_header,
    slot_bytes,
)
from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import CheckpointError, MissingFileError

_NUM_READ_ATTEMPTS = 100


class SlotReader(Closable):
    """An open slot. Its worker may be writing to it.

    Raises: MissingFileError when there is no such file; CheckpointError, from every method, when it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise MissingFileError(f"{path}: no such slot") from error
        except OSError as error:
            raise CheckpointError(f"{path}: the slot cannot be opened: {error.strerror}") from error
        try:
            self.header = self._checked_header()
        except BaseException:
            self.close()
            raise

    def _checked_header(self) -> SlotHeader:
        header = decode_header(self._read_header(is_exact=False), str(self.path))
        found, expected = os.fstat(self._file).st_size, slot_bytes(header.contents_bytes)
        if found != expected:
            raise CheckpointError(
                f"{self.path}: {found} bytes, and its header requires {expected}; the slot is truncated"
            )
        return header

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def words(self) -> SlotWords:
        """Return the words of the header, all from the same moment."""
        page = self._read_header()
        for _ in range(_NUM_READ_ATTEMPTS):
            # Two equal reads: nothing was stored in between, so all words are from the same moment.
            before, page = page, self._read_header()
            if page == before:
                return decode_words(page, str(self.path))
        raise CheckpointError(f"{self.path}: the header changed in each of {_NUM_READ_ATTEMPTS} reads")

    def read_contents_into(self, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill a buffer with the contents from `offset` on.

        They are of one snapshot if `words()` is equal before and after the read.
        """
        with memoryview(buffer) as view, view.cast("B") as rest:
            if offset + len(rest) > self.header.contents_bytes:
                raise CheckpointError(
                    f"{self.path}: bytes {offset} to {offset + len(rest)} were requested, but the contents have "
                    f"{self.header.contents_bytes} bytes"
                )
            done = 0
            while done < len(rest):
                done += self._read_some(HEADER_BYTES + offset + done, rest[done:])

    def _read_header(self, *, is_exact: bool = True) -> bytes:
        try:
            page = os.pread(self._file, HEADER_BYTES, 0)
        except OSError as error:
            raise CheckpointError(f"{self.path}: the slot cannot be read: {error.strerror}") from error
        if is_exact and len(page) != HEADER_BYTES:
            raise CheckpointError(f"{self.path}: {len(page)} of {HEADER_BYTES} bytes at 0; the slot was truncated")
        return page

    def _read_some(self, offset: int, buffer: memoryview) -> int:
        try:
            num_bytes = os.preadv(self._file, [buffer], offset)
        except OSError as error:
            raise CheckpointError(f"{self.path}: the slot cannot be read: {error.strerror}") from error
        if num_bytes == 0:
            raise CheckpointError(f"{self.path}: no bytes at {offset}; the slot was truncated while open")
        return num_bytes


def write_persist(path: Path, snapshot: int, outcome: Persist) -> bool:
    """Record whether a slot's snapshot was stored. Returns False if the slot no longer holds that snapshot.

    Raises: CheckpointError when the slot is missing, damaged or cannot be written.
    """
    with SlotReader(path) as reader:
        words = reader.words()
    if words.sealed is None or words.snapshot != snapshot:
        return False
    try:
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(file, outcome.to_bytes(8, "little"), 8 * SlotWord.PERSIST)
        finally:
            os.close(file)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error
    return True


def is_same_slot(path: Path, header: SlotHeader) -> bool:
    """Return whether a slot with this header exists."""
    try:
        # do not block if the name belongs to something else, such as a FIFO
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            page = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
        return decode_header(page, str(path)) == header and size == slot_bytes(header.contents_bytes)
    except (OSError, CheckpointError):
        return False


def make_slot(path: Path, header: SlotHeader) -> None:
    """Create an empty slot. It gets its final name only after its memory is reserved.

    Raises: CheckpointError naming the file and the missing memory.
    """
    size = slot_bytes(header.contents_bytes)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            os.pwrite(file, encode_header(header), 0)
        finally:
            os.close(file)
        temporary.rename(path)
    except OSError as error:
        with suppress(OSError):  # on a read-only file system, unlink fails even if there is no file
            temporary.unlink()
        if error.errno != errno.ENOSPC:
            raise CheckpointError(f"{path}: the slot cannot be created: {error.strerror}") from error
        raise CheckpointError(
            f"{path}: {path.parent.parent} has no space for a slot of {size} bytes; give it more memory, use "
            "checkpoint.slots=1, or name another checkpoint.arena_directory"
        ) from error


def missing_bytes(slots: Iterable[tuple[Path, SlotHeader]]) -> int:
    """Return how many bytes the slots that do not exist yet need. Removes existing slots that have another header.

    Raises: CheckpointError naming a slot that cannot be removed.
    """
    total = 0
    for path, header in slots:
        if not is_same_slot(path, header):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise CheckpointError(
                    f"{path}: cannot be removed: {error.strerror}; the arena is damaged, remove its directory"
                ) from error
            total += slot_bytes(header.contents_bytes)
    return total
