"""The audit of verdicts, <run>/incidents/audit.jsonl: a line for each outcome, appended and never changed.

A verdict that waited for a person has two lines. A line that a crash cut short is passed over and counted.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatrain.contracts.bounded_files import read_bounded
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.host_verdict import AuditEntry
from megatrain.contracts.record import decode, encode

AUDIT_NAME = "audit.jsonl"
_MOST_BYTES = 64 << 20
"""Tens of thousands of outcomes: no job has as many."""


def append_to_audit(path: Path, entry: AuditEntry) -> None:
    """Append a line, durable when this returns. Raises: OSError."""
    line = encode(entry) + b"\n"
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            # after a line that was cut short begins another one
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)
        os.fsync(file.fileno())


def read_audit(path: Path) -> tuple[list[AuditEntry], int]:
    """Return the entries in their order, and how many lines nobody can read; none where there is no file.

    Raises: OSError.
    """
    try:
        lines = read_bounded(path, _MOST_BYTES).split(b"\n")
    except FileNotFoundError:
        return [], 0
    entries: list[AuditEntry] = []
    num_damaged = 0
    for line in filter(None, lines):
        try:
            entries.append(decode(AuditEntry, line, str(path)))
        except CoordinationError:
            num_damaged += 1
    return entries, num_damaged
