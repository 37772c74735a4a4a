"""The standard streams of a command: open all of them, and find out whether everything was written to them."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO, cast


def open_standard_streams() -> None:
    """Open /dev/null for each closed descriptor of 0, 1 and 2; else the next opened file would receive the output.

    From now on `settle` finds each error of a write to stdout.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(number, True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _watched(sys.stdout)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # escape a character that the terminal cannot show instead of raising; Python does the same for stderr
        sys.stdout.reconfigure(errors="backslashreplace")


class _WatchedFile(io.FileIO):
    """A file that keeps its first write error, because the streams above it may suppress the error."""

    error: OSError | None = None

    def write(self, buffer: Any, /) -> int:
        try:
            return super().write(buffer)
        except OSError as error:
            self.error = self.error or error
            raise


def _watched(stdout: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a stream with the encoding and buffering of `stdout`, over a file that keeps its first write error."""
    file = _WatchedFile(stdout.fileno(), "w", closefd=False)
    is_direct = stdout.write_through  # PYTHONUNBUFFERED
    buffer = cast("io.BufferedWriter", file) if is_direct else io.BufferedWriter(file)
    return io.TextIOWrapper(buffer, stdout.encoding, line_buffering=stdout.line_buffering, write_through=is_direct)


def settle(stream: TextIO, error: OSError | None = None) -> OSError | None:
    """Flush a stream. Return the first error of a write to it, or else `error`; None if everything was written.

    After an error the stream is redirected to /dev/null: else Python would flush it again at exit, and replace the exit
    code.
    """
    try:
        stream.flush()
    except OSError as failure:
        error = error or failure
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    error = (raw.error if isinstance(raw, _WatchedFile) else None) or error
    if error is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return error
