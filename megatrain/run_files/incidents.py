"""The directory <run>/incidents: the incidents of a run, for readers without etcd, and the audit of verdicts.

The audit, audit.jsonl, has one line per outcome, appended and never changed. A verdict that waited for a user has two
lines. Readers skip and count a line that a crash cut short.
"""

from __future__ import annotations

from pathlib import Path

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.files.bounded_files import read_bounded
from megatrain.contracts.files.line_files import append_line, read_lines
from megatrain.contracts.records.host_verdict import AuditEntry
from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.record import decode, encode
from megatrain.run_files.run_directory import RunDirectory

_MAX_INCIDENT_BYTES = 4 << 20
"""The largest record to read: larger than any incident."""

AUDIT_NAME = "audit.jsonl"
_MAX_AUDIT_BYTES = 64 << 20
"""The largest file to read: tens of thousands of outcomes, more than any job has."""


def read_incidents(run: RunDirectory) -> tuple[tuple[Incident, ...], tuple[str, ...]]:
    """Return the incidents, oldest first, and a sentence for each file that cannot be read."""
    found: list[Incident] = []
    problems: list[str] = []
    for path in sorted(run.incidents.glob("*.json")):
        try:
            found.append(read_incident(path))
        except CoordinationError as error:
            problems.append(str(error))
    return tuple(sorted(found, key=lambda incident: incident.incident_id)), tuple(problems)


def read_incident(path: Path) -> Incident:
    """Return the incident in a file. Raises: CoordinationError if the file cannot be read or holds no incident."""
    try:
        return decode(Incident, read_bounded(path, _MAX_INCIDENT_BYTES), str(path))
    except OSError as error:
        raise CoordinationError(f"{path}: cannot be read: {error.strerror}") from error


def append_to_audit(path: Path, entry: AuditEntry) -> None:
    """Append a line, durable when this returns. Raises: OSError."""
    append_line(path, encode(entry))


def read_audit(path: Path) -> tuple[list[AuditEntry], int]:
    """Return the entries in order, and the number of lines that cannot be parsed; no entries without a file.

    Raises: OSError.
    """
    entries: list[AuditEntry] = []
    num_damaged = 0
    for line in read_lines(path, _MAX_AUDIT_BYTES):
        try:
            entries.append(decode(AuditEntry, line, str(path)))
        except CoordinationError:
            num_damaged += 1
    return entries, num_damaged
