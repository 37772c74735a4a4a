"""Reading a slot of an arena that its worker may be writing, and saying what became of its snapshot.

Files are read with pread, never mapped, so that a slot cut short or removed under us is an error and not a SIGBUS. The
bytes are in arena_layout.py; who finds slots is arena.py; who fills them is megatrain.checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from megatrain.contracts.arena_layout import (
    HEADER_BYTES,
    Persist,
    SlotHeader,
    SlotState,
    SlotWords,
    Word,
    decode_header,
    decode_words,
    slot_bytes,
)
from megatrain.contracts.errors import CheckpointError, MissingFileError

_NUM_READ_ATTEMPTS = 100


class SlotReader:
    """An open slot, which its worker may be writing.

    Raises: MissingFileError when there is no such file; CheckpointError, from every method, for one that is damaged.
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
        header = decode_header(self._read(0, HEADER_BYTES, is_exact=False), str(self.path))
        found, expected = os.fstat(self._file).st_size, slot_bytes(header.image_bytes)
        if found != expected:
            raise CheckpointError(f"{self.path}: {found} bytes, its header says {expected}; the slot is truncated")
        return header

    def __enter__(self) -> SlotReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def words(self) -> SlotWords:
        """Return the words as they stood at one moment."""
        page = self._read(0, HEADER_BYTES)
        for _ in range(_NUM_READ_ATTEMPTS):
            # Twice the same: nothing was stored in between, so no word is older than another.
            before, page = page, self._read(0, HEADER_BYTES)
            if page == before:
                return decode_words(page, str(self.path))
        raise CheckpointError(f"{self.path}: the header changed in each of {_NUM_READ_ATTEMPTS} reads")

    def read_image(self, offset: int, num_bytes: int) -> bytes:
        """Return a part of the image. It is of one snapshot if the words before and after say the same."""
        self._check_range(offset, num_bytes)
        return self._read(HEADER_BYTES + offset, num_bytes)

    def read_image_into(self, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill a buffer with the image from `offset` on, as read_image does, without making memory."""
        with memoryview(buffer) as view, view.cast("B") as rest:
            self._check_range(offset, len(rest))
            done = 0
            while done < len(rest):
                done += self._read_some(HEADER_BYTES + offset + done, rest[done:])

    def _check_range(self, offset: int, num_bytes: int) -> None:
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.header.image_bytes:
            raise CheckpointError(
                f"{self.path}: bytes {offset} to {offset + num_bytes} of an image of {self.header.image_bytes} bytes"
            )

    def _read(self, offset: int, num_bytes: int, *, is_exact: bool = True) -> bytes:
        try:
            raw = os.pread(self._file, num_bytes, offset)
        except OSError as error:
            raise CheckpointError(f"{self.path}: the slot cannot be read: {error.strerror}") from error
        if is_exact and len(raw) != num_bytes:
            raise CheckpointError(f"{self.path}: {len(raw)} of {num_bytes} bytes at {offset}; the slot was truncated")
        return raw

    def _read_some(self, offset: int, buffer: memoryview) -> int:
        try:
            num_bytes = os.preadv(self._file, [buffer], offset)
        except OSError as error:
            raise CheckpointError(f"{self.path}: the slot cannot be read: {error.strerror}") from error
        if num_bytes == 0:
            raise CheckpointError(f"{self.path}: nothing at {offset}; the slot was truncated while open")
        return num_bytes


def write_persist(path: Path, snapshot: int, outcome: Persist) -> bool:
    """Say what became of a slot's snapshot, unless the slot has another by now; return whether it was said.

    Raises: CheckpointError when the slot is gone, damaged or cannot be written.
    """
    with SlotReader(path) as reader:
        words = reader.words()
    if words.state != SlotState.SEALED or words.snapshot != snapshot:
        return False
    try:
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(file, outcome.to_bytes(8, "little"), 8 * Word.PERSIST)
        finally:
            os.close(file)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error
    return True
