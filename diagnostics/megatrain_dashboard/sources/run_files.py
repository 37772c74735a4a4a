"""The records of a run directory: incidents, audit, notes, configuration. Changed files are read again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatrain.config.config import Config
from megatrain.config.serialize import CONFIG_NAME, read_tables
from megatrain.contracts.errors import ConfigError, CoordinationError
from megatrain.contracts.records.host_verdict import AuditEntry
from megatrain.contracts.records.incident import Incident
from megatrain.formatting import count_text, printable
from megatrain.run_files.action_log import ACTIONS_NAME, read_actions
from megatrain.run_files.config_changes import CHANGES_NAME, ConfigChange, read_changes
from megatrain.run_files.incidents import AUDIT_NAME, read_audit, read_incident
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.jobs.notes import Note, notes_of

MAX_INCIDENTS = 2000
"""Only this many of the newest incidents are read."""


@dataclass(slots=True)
class RunFiles:
    """The records as they were read last. For use by one thread."""

    run: RunDirectory
    incidents: tuple[Incident, ...] = ()
    """Sorted by id, which sorts them by time."""
    entries: tuple[AuditEntry, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)
    """By id of an incident whose file cannot be read, the reason."""
    notes: tuple[Note, ...] = ()
    """Notes of people in the order in which they were written, including retracted ones."""
    changes: tuple[ConfigChange, ...] = ()
    """Changes of the configuration, by time."""
    problems: tuple[str, ...] = ()
    _signatures: dict[str, tuple[int, int]] = field(default_factory=dict)
    _known: dict[str, tuple[tuple[int, int], Incident | None, str]] = field(default_factory=dict)
    _problems: dict[str, str] = field(default_factory=dict)
    """By file name."""

    def poll(self) -> bool:
        """Read the files that have changed; return whether anything has changed."""
        has_changed = self._poll_incidents()
        for path, read in (
            (self.run.incidents / AUDIT_NAME, self._read_audit),
            (self.run.diagnosis / ACTIONS_NAME, self._read_notes),
            (self.run.diagnosis / CHANGES_NAME, self._read_changes),
        ):
            if self._is_new(path):
                has_changed = True
                try:
                    self._problems[path.name] = read(path)
                except OSError as error:
                    self._problems[path.name] = f"{path}: cannot be read: {error.strerror}"
        if has_changed:
            damaged = {name.removesuffix(".json"): why for name, (_, _, why) in self._known.items() if why}
            self.damaged = {printable(name): why for name, why in damaged.items()}  # as requests name them
            self.problems = (*list(self.damaged.values())[:20], *filter(None, self._problems.values()))
        return has_changed

    def _poll_incidents(self) -> bool:
        found: dict[str, tuple[int, int]] = {}
        try:
            with os.scandir(self.run.incidents) as entries:
                for entry in entries:
                    if entry.name.endswith(".json") and not entry.name.startswith(".") and entry.is_file():
                        status = entry.stat()
                        found[entry.name] = (status.st_mtime_ns, status.st_size)
        except OSError:
            return False
        newest = sorted(found)[-MAX_INCIDENTS:]
        if {name: known[0] for name, known in self._known.items()} == {name: found[name] for name in newest}:
            return False
        before = self._known
        self._known = {
            name: before[name] if name in before and before[name][0] == found[name] else self._read(name, found[name])
            for name in newest
        }
        known = [incident for _, incident, _ in self._known.values() if incident is not None]
        self.incidents = tuple(sorted(known, key=lambda incident: incident.incident_id))
        return True

    def _read(self, name: str, signature: tuple[int, int]) -> tuple[tuple[int, int], Incident | None, str]:
        path = self.run.incidents / name
        try:
            return signature, read_incident(path), ""
        except CoordinationError as error:
            return signature, None, str(error)

    def _read_audit(self, path: Path) -> str:
        entries, num_damaged = read_audit(path)
        self.entries = tuple(entries)
        return f"{path}: {count_text(num_damaged, 'line')} cannot be read" if num_damaged else ""

    def _read_notes(self, path: Path) -> str:
        self.notes = notes_of(read_actions(path).entries)
        return ""  # the audit reports a broken chain

    def _read_changes(self, path: Path) -> str:
        self.changes = read_changes(path)
        return ""

    def _is_new(self, path: Path) -> bool:
        try:
            status = path.stat()
        except OSError:
            return False
        signature = (status.st_mtime_ns, status.st_size)
        is_new = self._signatures.get(path.name) != signature
        self._signatures[path.name] = signature
        return is_new


def read_config(run: RunDirectory) -> tuple[Config | None, str]:
    """Return the configuration in a run directory, and why it cannot be read; (None, "") where the run has none."""
    tables, problem = read_tables(run.root)
    try:
        return None if tables is None else Config.from_dict(tables), problem
    except ConfigError as error:
        return None, f"{CONFIG_NAME} is not valid in this version of megatrain: {error.problems[0]}"
