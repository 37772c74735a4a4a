"""The incidents of a run from its directory, for readers without etcd."""

from __future__ import annotations

from pathlib import Path

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.files.bounded_files import read_bounded
from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.record import decode
from megatrain.run_files.run_directory import RunDirectory

_MAX_BYTES = 4 << 20
"""Limit for one record: no incident is as large."""


def read_incidents(run: RunDirectory) -> tuple[tuple[Incident, ...], tuple[str, ...]]:
    """Return the incidents, oldest first, and a sentence for each file that cannot be read."""
    found: list[Incident] = []
    problems: list[str] = []
    for path in sorted(run.incidents.glob("*.json")):
        try:
            found.append(read_incident(path))
        except CoordinationError as error:
            problems.append(str(error))
    return tuple(sorted(found, key=lambda one: one.incident_id)), tuple(problems)


def read_incident(path: Path) -> Incident:
    """Return the incident of a file. Raises: CoordinationError if it cannot be read, or is none."""
    try:
        return decode(Incident, read_bounded(path, _MAX_BYTES), str(path))
    except OSError as error:
        raise CoordinationError(f"{path}: cannot be read: {error.strerror}") from error
