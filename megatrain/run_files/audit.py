"""The audit of verdicts, <run>/incidents/audit.jsonl: one line per outcome, appended and never changed.

A verdict that waited for a person has two lines. Readers skip and count a line that a crash cut short.
"""

from __future__ import annotations

from pathlib import Path

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.files.line_files import append_line, read_lines
from megatrain.contracts.records.host_verdict import AuditEntry
from megatrain.contracts.records.record import decode, encode

AUDIT_NAME = "audit.jsonl"
_MAX_BYTES = 64 << 20
"""The largest file to read: tens of thousands of outcomes, more than any job has."""


def append_to_audit(path: Path, entry: AuditEntry) -> None:
    """Append a line, durable when this returns. Raises: OSError."""
    append_line(path, encode(entry))


def read_audit(path: Path) -> tuple[list[AuditEntry], int]:
    """Return the entries in order, and the number of lines that cannot be parsed; no entries without a file.

    Raises: OSError.
    """
    entries: list[AuditEntry] = []
    num_damaged = 0
    for line in read_lines(path, _MAX_BYTES):
        try:
            entries.append(decode(AuditEntry, line, str(path)))
        except CoordinationError:
            num_damaged += 1
    return entries, num_damaged
