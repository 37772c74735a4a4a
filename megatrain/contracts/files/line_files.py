"""Append-only files of lines with one writer. Appends are durable, even if a crash has truncated the last line."""

from __future__ import annotations

import os
from pathlib import Path

from megatrain.contracts.files.bounded_files import read_bounded


def append_line(path: Path, line: bytes) -> None:
    """Append a line, durable when this returns. Raises: OSError."""
    whole = line + b"\n"
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            # after an incomplete line, begin a new one
            whole = whole if file.read(1) == b"\n" else b"\n" + whole
        file.write(whole)
        os.fsync(file.fileno())


def read_lines(path: Path, max_bytes: int) -> list[bytes]:
    """Return the lines that are not empty; an empty list without a file. Raises: OSError."""
    try:
        return list(filter(None, read_bounded(path, max_bytes).split(b"\n")))
    except FileNotFoundError:
        return []
