"""Stores batches on a host's disk while the daemon cannot take them: one Arrow IPC stream per file.

A file's name has the time of its batch, its number and rows, and its table, so that names sort by age. Any Arrow reader
can open the files. A power failure may lose some of them; a restarted sender sends the files that it finds.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from megatrain.contracts.files.whole_files import is_temporary_name, temporary_name

_NAME = re.compile(r"(\d{20})-(\d{12})-(\d{1,9})\.([a-z_]{1,32})\.arrow")


@dataclass(frozen=True, slots=True)
class SpooledBatch:
    """A file of the spool, as described by its name."""

    path: Path
    table: str
    num_rows: int
    num_bytes: int
    made_unix_ns: int


class Spool:
    """The directory of the files. All methods raise OSError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def found(self) -> list[SpooledBatch]:
        """Return the files of an earlier sender, oldest first. Removes temporary files and skips foreign files."""
        batches = []
        for path in sorted(self.directory.iterdir()):
            if is_temporary_name(path.name):
                path.unlink(missing_ok=True)
                continue
            match = _NAME.fullmatch(path.name)
            if match is not None and path.is_file():
                made, _, rows, table = match.groups()
                batches.append(SpooledBatch(path, table, int(rows), path.stat().st_size, int(made)))
        return batches

    def write(self, content: pa.Buffer, table: str, number: int, num_rows: int, made_unix_ns: int) -> Path:
        """Write a batch atomically; return the path."""
        path = self.directory / f"{max(0, made_unix_ns):020d}-{number:012d}-{num_rows}.{table}.arrow"
        temporary = path.with_name(temporary_name(path.name))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # the directory may have been removed
            temporary.write_bytes(content)
            temporary.rename(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return path


def read_spooled(path: Path) -> pa.Buffer:
    """Return the bytes of a spooled batch. Raises: OSError."""
    return pa.py_buffer(path.read_bytes())


def remove_spooled(path: Path) -> None:
    """Remove a spooled batch, if it still exists and can be removed."""
    try:
        os.unlink(path)
    except OSError:
        # a restarted sender then sends the file again; duplicate rows are removed by their keys
        return
