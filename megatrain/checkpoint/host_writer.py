"""This host's writer process, as the workers see it: wake it, and read its results."""

from __future__ import annotations

from pathlib import Path

from megatrain.checkpoint.writer import call_writer
from megatrain.contracts.arena import Arena
from megatrain.contracts.arena_plans import WriterStatus
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.texts import bytes_text, seconds_text


class HostWriter:
    """The writer of an arena. Results from before count as reported."""

    def __init__(self, arena: Arena, log: Path) -> None:
        """log: where the output of a writer that is started goes."""
        self._arena = arena
        self._log = log
        self._start_problem = ""
        status = self._status()
        self._told = (status.pid, status.num_persisted, status.num_failures) if status is not None else (0, 0, 0)
        """The last known process, and its results at that time."""

    def call(self) -> None:
        """Wake the writer for new work; start one where none runs. A failure is reported; the next call tries again."""
        try:
            call_writer(self._arena, self._log)
        except CheckpointError as error:
            self._start_problem = f"{error}; it is tried again"

    def news(self) -> list[str]:
        """Return what has happened since the last call, in words. Only looks."""
        lines = [self._start_problem] if self._start_problem else []
        self._start_problem = ""
        status = self._status()
        if status is None:
            return lines
        # a writer that was started anew counts anew
        _, persisted, failures = self._told if self._told[0] == status.pid else (0, 0, 0)
        self._told = (status.pid, status.num_persisted, status.num_failures)
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
        """Return how long the last write to storage took that went well; 0 before there was one."""
        status = self._status()
        return status.last_write_s if status is not None else 0.0

    def last_error(self) -> str:
        """Return what went wrong last, or where to look for it."""
        status = self._status()
        return (status.last_error if status is not None else "") or f"see {self._log}"

    def _status(self) -> WriterStatus | None:
        try:
            return WriterStatus.read(self._arena.writer_status)
        except CheckpointError:
            return None
