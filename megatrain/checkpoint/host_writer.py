"""The workers' interface to this host's writer process: start or wake it, and read its results."""

from __future__ import annotations

import sys
from pathlib import Path

from megatrain.arena.directory import Arena, wake_writer
from megatrain.arena.locks import is_held
from megatrain.arena.plans import WriterStatus
from megatrain.contracts.errors import CheckpointError
from megatrain.formatting import bytes_text, seconds_text
from megatrain.programs.child_process import start_companion


class HostWriter:
    """The writer of an arena. Results that exist when this object is created count as reported."""

    def __init__(self, arena: Arena, log: Path) -> None:
        """log: the file for the output of a writer that this object starts."""
        self._arena = arena
        self._log = log
        self._start_problem = ""
        status = self._status()
        self._reported = (status.pid, status.num_persisted, status.num_failures) if status is not None else (0, 0, 0)
        """The last known process id, and that process's results at that time."""

    def wake_or_start(self) -> None:
        """Wake the writer for new work, or start one if none runs.

        `new_messages` reports a failure; a later call retries.
        """
        try:
            wake_or_start_writer(self._arena, self._log)
        except CheckpointError as error:
            self._start_problem = f"{error}; the writer is started again later"

    def new_messages(self) -> list[str]:
        """Return messages about what has happened since the last call. Only reads the writer's status."""
        lines = [self._start_problem] if self._start_problem else []
        self._start_problem = ""
        status = self._status()
        if status is None:
            return lines
        # a new writer process counts from zero
        _, persisted, failures = self._reported if self._reported[0] == status.pid else (0, 0, 0)
        self._reported = (status.pid, status.num_persisted, status.num_failures)
        if status.num_persisted > persisted:
            rate = bytes_text(round(status.last_write_bytes / max(status.last_write_s, 1e-9)))
            lines.append(
                f"checkpoint of step {status.last_persisted_step} is in storage (this host: "
                f"{bytes_text(status.last_write_bytes)} in {seconds_text(status.last_write_s)}, {rate}/s)"
            )
        if status.num_failures > failures:
            lines.append(f"a checkpoint FAILED and is tried again at the next interval: {status.last_error}")
        return lines

    def last_write_s(self) -> float:
        """Return how long the last successful write to storage took; 0 before the first one."""
        status = self._status()
        return status.last_write_s if status is not None else 0.0

    def last_error(self) -> str:
        """Return the writer's last error; if it is unknown, the path of the log to read."""
        status = self._status()
        return (status.last_error if status is not None else "") or f"see {self._log}"

    def _status(self) -> WriterStatus | None:
        try:
            return WriterStatus.read(self._arena.writer_status)
        except CheckpointError:
            return None


def wake_or_start_writer(arena: Arena, log: Path) -> None:
    """Wake the writer of this host for new work, or start one if none runs.

    Raises: CheckpointError naming the arena.
    """
    if not wake_writer(arena):
        start_writer(arena, log)


def start_writer(arena: Arena, log: Path) -> int | None:
    """Start the writer of this host in its own session, unless one is running, and return its process id.

    Its output is appended to `log` if that can be opened: a full disk there must not prevent checkpoints elsewhere.
    The writer outlives this process.
    Raises: CheckpointError naming the arena.
    """
    if is_held(arena.writer_lock):
        return None
    command = [sys.executable, "-m", "megatrain.checkpoint.writer", str(arena.root)]
    try:
        return start_companion(command, log, "checkpoint-writer").pid
    except OSError as error:
        raise CheckpointError(f"the checkpoint writer of {arena.root} cannot be started: {error.strerror}") from error
