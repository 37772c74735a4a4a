"""A rank's log on disk, bounded in size: a file, and older ones with numbers appended.

A full or failing disk loses lines but raises no error: lost bytes are counted, and their number is written to the file
when writing works again. A removed file is recreated, and its lost content is counted too.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatrain.contracts.files.vanished_files import is_in_place

_MAX_BYTES: Final = 64 << 20
_NUM_FILES: Final = 4


@dataclass(slots=True)
class RotatingFile:
    """Appends to `path`. A full file is renamed to `path`.1, the earlier `path`.1 to `path`.2, and so on.

    At most `num_files` files are kept.
    """

    path: Path
    max_bytes: int = _MAX_BYTES
    num_files: int = _NUM_FILES
    problem: str = ""
    """The reason why lines are being lost; empty if they are not."""
    _fd: int = -1
    _size: int = 0
    _lost_bytes: int = 0
    _removed_bytes: int = 0

    def write(self, chunk: bytes) -> None:
        """Append bytes, as many of them as the disk accepts."""
        rest = memoryview(chunk)
        try:
            if self._fd < 0:
                self._open()
            self._write_loss_notes()
            while len(rest):
                num_fitting = self._num_fitting(rest)
                if num_fitting:
                    rest = rest[self._write_all(rest[:num_fitting]) :]
                else:
                    self._rotate()
        except OSError as error:
            self._lost_bytes += len(rest)
            self.problem = f"{self.path} cannot be written ({error.strerror}); lines are lost, but training continues"
            return
        self.problem = ""

    def recreate_if_removed(self) -> bool:
        """Recreate the open file if it was removed; return whether it was."""
        if self._fd < 0 or is_in_place(self._fd, self.path):
            return False
        self._removed_bytes += self._size
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = -1
        self.write(b"")
        return True

    def lose(self, num_bytes: int) -> None:
        """Count bytes that the caller dropped."""
        self._lost_bytes += num_bytes

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._write_loss_notes()
            with contextlib.suppress(OSError):  # the error of a delayed write, which cannot be repeated here
                os.close(self._fd)
            self._fd = -1

    def _num_fitting(self, rest: memoryview) -> int:
        """Return how many bytes go into this file: whole lines, if one ends within the bound."""
        free_bytes = max(self.max_bytes - self._size, 0)
        if len(rest) <= free_bytes:
            return len(rest)
        end_of_line = bytes(rest[:free_bytes]).rfind(b"\n") + 1
        return end_of_line or (0 if self._size else free_bytes)

    def _write_all(self, part: memoryview) -> int:
        written = 0
        while written < len(part):
            try:
                count = os.write(self._fd, part[written:])
            except OSError:
                if written:
                    return written  # the rest gets the same error, and is counted then
                raise
            written += count
            self._size += count
        return written

    def _write_loss_notes(self) -> None:
        if self._removed_bytes:
            note = f"[megatrain: this log was removed from outside; its {self._removed_bytes} bytes are lost]\n"
            self._write_all(memoryview(note.encode()))
            self._removed_bytes = 0
        if self._lost_bytes:
            note = f"[megatrain: {self._lost_bytes} bytes could not be written here]\n"
            self._write_all(memoryview(note.encode()))
            self._lost_bytes = 0

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # follow no symbolic link and do not block on a pipe: other users may be able to write in --log-dir
        flags = os.O_NOFOLLOW | os.O_NONBLOCK
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | flags, 0o644)
        self._size = os.fstat(self._fd).st_size

    def _rotate(self) -> None:
        self.close()
        for number in range(self.num_files - 1, 0, -1):
            older = self._numbered(number)
            newer = self._numbered(number - 1)
            if newer.exists():
                newer.replace(older)
        if self.num_files == 1:
            self.path.unlink(missing_ok=True)
        self._open()

    def _numbered(self, number: int) -> Path:
        return self.path if number == 0 else self.path.with_name(f"{self.path.name}.{number}")
