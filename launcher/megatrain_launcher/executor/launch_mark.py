"""A mark of the launch in the run directory: it shows a host whether its directory is the first host's."""

from __future__ import annotations

import logging
import threading

from megatrain.contracts.files.bounded_files import read_below
from megatrain.contracts.files.whole_files import write_private
from megatrain.contracts.records.rounds import JobRecord
from megatrain.run_files.run_directory import RunDirectory

_logger = logging.getLogger(__name__)
_NAME = "launch"
_MAX_BYTES = 1 << 10
_TRIES = 10
_TRY_S = 0.5
"""A network file system may show a new file seconds later."""


def leave_mark(run: RunDirectory, record: JobRecord) -> None:
    """Write the launch's mark; only the first host does so. A failed write is logged."""
    try:
        write_private(run.diagnosis / _NAME, f"{record.launch_id}\n".encode())
    except OSError as error:
        _logger.warning("%s cannot be written: %s", run.diagnosis / _NAME, error.strerror)


def why_not_shared(run: RunDirectory, record: JobRecord, host: str, closed: threading.Event) -> str:
    """Return what a host lacks because its run directory is not the first host's; empty if it is."""
    for _ in range(_TRIES):
        if record.first_host == host or _read(run) == record.launch_id or closed.wait(_TRY_S):
            return ""
    return (
        f"{run.root} on {host} is not that of {record.first_host}: the page and the daemon, which now run here, have "
        "only what is recorded from now on; set job.run_directory to storage that all hosts share"
    )


def _read(run: RunDirectory) -> str:
    try:
        return read_below(run.diagnosis, _NAME, _MAX_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
