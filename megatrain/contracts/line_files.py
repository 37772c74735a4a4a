"""Append-only files of lines with one writer: durable, whatever a crash cut short before."""

from __future__ import annotations

import os
from pathlib import Path

from megatrain.contracts.bounded_files import read_bounded


def append_line(path: Path, line: bytes) -> None:
    """Append a line, durable when this returns. Raises: OSError."""
    whole = line + b"\n"
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            # after a line that was cut short begins another one
            whole = whole if file.read(1) == b"\n" else b"\n" + whole
        file.write(whole)
        os.fsync(file.fileno())


def read_lines(path: Path, most_bytes: int) -> list[bytes]:
    """Return the lines that are not empty; none where there is no file. Raises: OSError."""
    try:
        return list(filter(None, read_bounded(path, most_bytes).split(b"\n")))
    except FileNotFoundError:
        return []
