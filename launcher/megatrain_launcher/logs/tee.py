"""Copies lines of chosen ranks to the executor's own output, each with its rank in front.

The reader of that output may be slow or stopped: lines wait in a bounded buffer, and lines beyond it are dropped and
counted. The ranks never wait.
"""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass, field
from typing import Final, Literal

TeeChoice = Literal["none", "first", "all"]

_MAX_WAITING_BYTES: Final = 1 << 20
_MAX_LINE_BYTES: Final = 64 << 10
_MAX_WRITE_BYTES: Final = select.PIPE_BUF  # a pipe that polls as writable accepts this much without blocking


def is_shown(choice: TeeChoice, rank: int) -> bool:
    """Return whether a rank's lines are shown. "first" is rank 0 of the job."""
    return choice == "all" or (choice == "first" and rank == 0)


@dataclass(slots=True)
class Tee:
    """Writes lines to `fd` when the reader accepts them."""

    fd: int
    _waiting: bytearray = field(default_factory=bytearray)
    _unended: dict[int, bytes] = field(default_factory=dict)
    _num_left_out: int = 0
    _is_broken: bool = False

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def feed(self, rank: int, chunk: bytes) -> None:
        """Take bytes of a rank's log and show the lines that they complete."""
        lines = (self._unended.pop(rank, b"") + chunk).splitlines(keepends=True)
        if lines and not lines[-1].endswith((b"\n", b"\r")) and len(lines[-1]) < _MAX_LINE_BYTES:
            self._unended[rank] = lines.pop()
        for line in lines:
            self._put(b"[rank %d] %s\n" % (rank, line.rstrip(b"\r\n")))
        self.flush()

    def end(self, rank: int) -> None:
        """Show a rank's last line, which has no newline."""
        rest = self._unended.pop(rank, b"")
        if rest:
            self._put(b"[rank %d] %s\n" % (rank, rest))
        self.flush()

    def flush(self) -> None:
        """Write what the reader accepts now."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        while self._waiting and not self._is_broken and poll.poll(0):
            try:
                written = os.write(self.fd, self._waiting[:_MAX_WRITE_BYTES])
            except BlockingIOError:
                return
            except OSError:  # the reader is gone; the log files have all lines
                self._is_broken = True
                self._waiting.clear()
                return
            del self._waiting[:written]

    def flush_all(self, timeout_s: float) -> None:
        """Write the buffered lines, for at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        while self._waiting and (left_s := deadline - time.monotonic()) > 0:
            poll.poll(left_s * 1000)
            self.flush()

    def _put(self, line: bytes) -> None:
        if self._is_broken:
            return
        if len(self._waiting) + len(line) > _MAX_WAITING_BYTES:
            self._num_left_out += 1
            return
        if self._num_left_out:
            self._waiting += b"[megatrain: %d lines left out here; the files have them]\n" % self._num_left_out
            self._num_left_out = 0
        self._waiting += line
