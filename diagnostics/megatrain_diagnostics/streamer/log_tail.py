"""Reads the workers' logs as they grow; each line has the offset of its end in the whole output of the rank.

The launcher rotates logs: it renames a full file to <name>.1 and creates a new one. The old file is read to its end
first, and offsets continue. Logs are read at a bounded rate; the lines of a rank that floods its log arrive late.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain_diagnostics.events.tables import LogLines, from_columns, joined

_ROUND = re.compile(r"round-(\d{1,9})")
_LOG = re.compile(r"rank-(\d{1,9})\.log")
_READ_BYTES = 1 << 20
"""Limit of one read of a log, and of an unfinished line. A poll reads twice at most: before and after a rotation."""
_MAX_LINE_BYTES = 4096
_ROUNDS_FOLLOWED = 2


@dataclass(frozen=True, slots=True)
class LogPosition:
    """The position after the last line read: `offset` in the file `inode`, after `before` bytes of earlier files."""

    inode: int
    offset: int
    before: int


class LogTail:
    """Follows the log of one rank in one round."""

    def __init__(self, path: Path, host: str, round_number: int, rank: int, start: LogPosition | None = None) -> None:
        self._path, self._host, self._round, self._rank = path, host, round_number, rank
        self._file = -1
        self._inode = 0
        self._offset = 0
        """Offset up to which the open file was read, including unfinished lines."""
        self._before = 0
        self._rest = b""
        if start is not None:
            self._go_on(start)

    @property
    def position(self) -> LogPosition:
        """Return where to continue after a restart: the end of the last complete line."""
        return LogPosition(self._inode, self._offset - len(self._rest), self._before)

    def poll(self, at_ns: int) -> LogLines:
        """Return the complete lines since the last poll."""
        lines: list[tuple[int, bytes]] = []
        for _ in range(2):  # the rest of a renamed file, then the new file with its name
            if self._file < 0 and not self._open(self._path):
                break
            lines += self._read_lines()
            if _inode(self._path) == self._inode or os.fstat(self._file).st_size > self._offset:
                break
            self._leave_file(lines)
        return from_columns(
            LogLines,
            {
                "round": [self._round] * len(lines),
                "rank": [self._rank] * len(lines),
                "sequence": [end for end, _ in lines],
                "at_ns": [at_ns] * len(lines),
                "host": [self._host] * len(lines),
                "line": [text.decode(errors="replace") for _, text in lines],
            },
        )

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _go_on(self, start: LogPosition) -> None:
        for path in (self._path, self._path.with_name(f"{self._path.name}.1")):
            if _inode(path) == start.inode and self._open(path):
                self._offset, self._before = start.offset, start.before
                return
        # the file at this position no longer exists: the next file begins at this offset
        self._before = start.before + start.offset

    def _open(self, path: Path) -> bool:
        # no link is followed and no pipe blocks: other users may be able to write in this directory
        with suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            self._inode, self._offset = os.fstat(self._file).st_ino, 0
            return True
        return False

    def _read_lines(self) -> list[tuple[int, bytes]]:
        try:
            chunk = os.pread(self._file, _READ_BYTES, self._offset)
        except OSError:
            return []
        begin = self._before + self._offset - len(self._rest)
        self._offset += len(chunk)
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        lines = []
        for line in whole:
            begin += len(line) + 1
            if line.strip():
                lines.append((begin, line[:_MAX_LINE_BYTES].rstrip(b"\r")))
        if len(self._rest) > _READ_BYTES:  # too long for a line: it is truncated and sent before its end is read
            lines.append((begin + len(self._rest), self._rest[:_MAX_LINE_BYTES]))
            self._rest = b""
        return lines

    def _leave_file(self, lines: list[tuple[int, bytes]]) -> None:
        """Close a file that was rotated; an unfinished line at its end is returned as it is."""
        self._before += self._offset
        if self._rest.strip():
            lines.append((self._before, self._rest[:_MAX_LINE_BYTES]))
        self._rest, self._offset = b"", 0
        self.close()


class HostLogs:
    """Follows the logs of the newest rounds in a host's log directory."""

    def __init__(self, directory: Path, host: str, start_of: Callable[[str], LogPosition | None]) -> None:
        """`start_of`: "round/rank" -> position to continue at; None: read the log from its beginning."""
        self._directory, self._host, self._start_of = directory, host, start_of
        self._tails: dict[tuple[int, int], LogTail] = {}

    def find(self) -> None:
        """Open new logs, and close all logs except those of the two newest rounds."""
        rounds = sorted(_numbers(self._directory, _ROUND))[-_ROUNDS_FOLLOWED:]
        found = {(number, rank) for number, name in rounds for rank, _ in _numbers(self._directory / name, _LOG)}
        for key in self._tails.keys() - found:
            self._tails.pop(key).close()
        for number, rank in sorted(found - self._tails.keys()):
            path = self._directory / f"round-{number:06d}" / f"rank-{rank:05d}.log"
            start = self._start_of(_name(number, rank))
            self._tails[number, rank] = LogTail(path, self._host, number, rank, start)

    def poll(self, at_ns: int) -> LogLines:
        return joined(LogLines, [tail.poll(at_ns) for _, tail in sorted(self._tails.items())])

    def positions(self) -> dict[str, LogPosition]:
        """Return how far each log was read, by "round/rank"."""
        return {_name(*key): tail.position for key, tail in sorted(self._tails.items())}

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()


def _name(number: int, rank: int) -> str:
    return f"{number}/{rank}"


def _numbers(directory: Path, pattern: re.Pattern[str]) -> list[tuple[int, str]]:
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return [(int(match[1]), name) for name in names if (match := pattern.fullmatch(name))]


def _inode(path: Path) -> int:
    try:
        return path.lstat().st_ino
    except OSError:
        return 0
