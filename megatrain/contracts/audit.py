"""The audit of verdicts, <run>/incidents/audit.jsonl: a line for each outcome, appended and never changed.

A verdict that waited for a person has two lines. A line that a crash cut short is skipped and counted.
"""

from __future__ import annotations

from pathlib import Path

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.host_verdict import AuditEntry
from megatrain.contracts.line_files import append_line, read_lines
from megatrain.contracts.record import decode, encode

AUDIT_NAME = "audit.jsonl"
_MOST_BYTES = 64 << 20
"""Tens of thousands of outcomes: no job has as many."""


def append_to_audit(path: Path, entry: AuditEntry) -> None:
    """Append a line, durable when this returns. Raises: OSError."""
    append_line(path, encode(entry))


def read_audit(path: Path) -> tuple[list[AuditEntry], int]:
    """Return the entries in their order, and how many lines cannot be parsed; none where there is no file.

    Raises: OSError.
    """
    entries: list[AuditEntry] = []
    num_damaged = 0
    for line in read_lines(path, _MOST_BYTES):
        try:
            entries.append(decode(AuditEntry, line, str(path)))
        except CoordinationError:
            num_damaged += 1
    return entries, num_damaged
