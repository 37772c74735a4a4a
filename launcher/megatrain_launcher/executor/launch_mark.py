"""A mark of the launch in the run directory: by it a host sees whether its directory is that of the first host."""

from __future__ import annotations

import logging
import threading

from megatrain.contracts.bounded_files import read_below
from megatrain.contracts.rounds import JobRecord
from megatrain.contracts.run_directory import RunDirectory
from megatrain.contracts.whole_files import write_private

_logger = logging.getLogger(__name__)
_NAME = "launch"
_MOST_BYTES = 1 << 10
_TRIES = 10
_TRY_S = 0.5
"""A network file system may show a new file seconds later."""


def leave_mark(run: RunDirectory, record: JobRecord) -> None:
    """Write which launch this is; for its first host. A failed write is logged."""
    try:
        write_private(run.diagnosis / _NAME, f"{record.launch_id}\n".encode())
    except OSError as error:
        _logger.warning("%s cannot be written: %s", run.diagnosis / _NAME, error.strerror)


def why_not_shared(run: RunDirectory, record: JobRecord, host: str, closed: threading.Event) -> str:
    """Return what a host misses whose run directory is not that of the first host; empty where it is."""
    for _ in range(_TRIES):
        if record.first_host == host or _read(run) == record.launch_id or closed.wait(_TRY_S):
            return ""
    return (
        f"{run.root} on {host} is not that of {record.first_host}: page and daemon, which run here now, know only what "
        "is recorded from now on; set job.run_directory to storage that all hosts share"
    )


def _read(run: RunDirectory) -> str:
    try:
        return read_below(run.diagnosis, _NAME, _MOST_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
