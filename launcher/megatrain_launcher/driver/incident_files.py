"""Writes incidents and the audit of verdicts to the run directory, where they stay readable without etcd.

audit.jsonl has a line for each outcome of a verdict, with the verdict; lines are only appended. A separate thread
writes, because the driver must continue to decide while the run directory's storage is unavailable.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Self

from megatrain.contracts.closable import Closable
from megatrain.contracts.files.whole_files import temporary_name
from megatrain.contracts.records.host_verdict import AuditEntry
from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.record import encode
from megatrain.run_files.incidents import AUDIT_NAME, append_to_audit, read_audit

_logger = logging.getLogger(__name__)
_SLOW_S = 10.0
_END_S = 5.0


class IncidentFiles(Closable):
    """A context manager that writes <directory>/<incident id>.json, and the audit. `problem` reports disk errors."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._problem = ""
        self._changed = threading.Condition()
        self._waiting: dict[str, Incident | AuditEntry] = {}
        self._newest: dict[str, Incident | AuditEntry] = {}
        """The newest version of every record that was ever queued."""
        self._must_reopen_audit = False
        self._busy_since: float | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._directory is not None:
            self._is_closed = False
            self._thread = threading.Thread(target=self._run, args=(self._directory,), name="incidents", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_END_S)  # unresponsive storage must not delay the exit for longer

    @property
    def problem(self) -> str:
        """The reason why incidents cannot be written; empty if they can."""
        with self._changed:
            since = self._busy_since
            if since is not None and time.monotonic() - since > _SLOW_S:
                return f"incidents cannot be written to {self._directory}: its storage does not respond"
            return self._problem

    def write(self, incident: Incident) -> None:
        """Queue an incident to be written. If several versions are queued, only the newest is written."""
        self._put(incident.incident_id, incident)

    def audit(self, entry: AuditEntry) -> None:
        """Queue an outcome for the audit. An outcome that the file already has is not appended again."""
        self._put(f"{AUDIT_NAME}/{entry.outcome.verdict_id}/{entry.outcome.kind}", entry)

    def write_again(self) -> None:
        """Queue all records again, because their files were removed."""
        with self._changed:
            self._waiting = {**self._newest, **self._waiting}
            self._must_reopen_audit = True
            self._changed.notify_all()

    def _put(self, name: str, record: Incident | AuditEntry) -> None:
        if self._directory is not None:
            with self._changed:
                self._waiting[name] = self._newest[name] = record
                self._changed.notify_all()

    def _run(self, directory: Path) -> None:
        audit = _Audit(directory / AUDIT_NAME)
        while True:
            with self._changed:
                self._busy_since = None
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                if self._must_reopen_audit:
                    audit, self._must_reopen_audit = _Audit(directory / AUDIT_NAME), False
                record = self._waiting.pop(next(iter(self._waiting)))
                self._busy_since = time.monotonic()
            problem = _write_incident(directory, record) if isinstance(record, Incident) else audit.append(record)
            with self._changed:
                self._problem = problem


def _write_incident(directory: Path, incident: Incident) -> str:
    """Write an incident's file; return the error, empty if it was written."""
    path = directory / f"{incident.incident_id}.json"
    raw = encode(incident) + b"\n"
    try:
        draft = path.with_name(temporary_name(path.name))
        if path.is_file() and path.read_bytes() == raw:
            return ""
        directory.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_bytes(raw)
            os.replace(draft, path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:  # ValueError: the id is not a valid file name
        why = getattr(error, "strerror", None) or error
        problem = f"incident {incident.incident_id!r} cannot be written to {directory}: {why}"
        _logger.warning("%s", problem)
        return problem
    return ""


class _Audit:
    """The audit file. Each driver of the job appends the outcomes that are not in the file yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: set[tuple[str, str]] = set()

    def append(self, entry: AuditEntry) -> str:
        """Append an outcome unless the file has it; return the error, empty if there was none."""
        name = (entry.outcome.verdict_id, str(entry.outcome.kind))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if name not in self._known:  # an earlier driver may have appended it
                self._known = {
                    (entry.outcome.verdict_id, str(entry.outcome.kind)) for entry in read_audit(self._path)[0]
                }
            if name not in self._known:
                append_to_audit(self._path, entry)
                self._known.add(name)
        except OSError as error:
            problem = f"the outcome of verdict {name[0]!r} cannot be written to {self._path}: {error.strerror}"
            _logger.warning("%s", problem)
            return problem
        return ""
