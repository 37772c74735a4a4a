"""Incidents as JSON files in the run directory: what is left to read when etcd is gone."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from megatrain.contracts.incident import Incident
from megatrain.contracts.record import encode
from megatrain.contracts.whole_files import temporary_name

_logger = logging.getLogger(__name__)


class IncidentFiles:
    """Writes <directory>/<incident id>.json. Trouble with the disk is told and never stops the driver."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self.trouble = ""

    def write(self, incident: Incident) -> None:
        """Write an incident, or write it anew, as a whole."""
        if self._directory is None:
            return
        path = self._directory / f"{incident.incident_id}.json"
        draft = path.with_name(temporary_name(path.name))
        raw = encode(incident) + b"\n"
        try:
            if path.is_file() and path.read_bytes() == raw:
                return
            self._directory.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(raw)
            os.replace(draft, path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            self.trouble = f"incident {incident.incident_id} cannot be written to {self._directory}: {error.strerror}"
            _logger.warning("%s", self.trouble)
        else:
            self.trouble = ""
