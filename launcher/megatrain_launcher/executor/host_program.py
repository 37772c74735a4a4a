"""Runs the host programs that installed distributions provide: the streamer of the diagnosis.

A distribution declares an entry point in the group `megatrain.host_program`: a function with the keywords that
`_command` passes. It returns a command with its arguments, or an empty list if there is nothing to run. Training does
not depend on the program. If the function raises an error, this is logged, and the program does not run. A program that
cannot be started, or that exits, is logged and started again after a pause, unless a restart cannot help.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from megatrain.programs.child_process import ChildProcess
from megatrain.programs.supervisor import Supervisor
from megatrain.run_files.run_directory import safe_name
from megatrain_job.commands.etcd_flags import etcd_arguments, etcd_environment
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_launcher.executor.settings import ExecutorSettings

ENTRY_POINT_GROUP = "megatrain.host_program"
_logger = logging.getLogger(__name__)
_STOP_S = 5.0
"""The time that a program may take to send its remaining data after it was asked to exit."""


class HostProgram:
    """Supervises one program until `close`."""

    def __init__(self, entry_point: importlib.metadata.EntryPoint, settings: ExecutorSettings) -> None:
        self._entry_point = entry_point
        self._settings = settings
        self._logs = settings.logs / safe_name(settings.host)
        self._closed = threading.Event()
        self._supervisor: Supervisor | None = None
        self.is_supervised = False
        """Whether there is a program to run; it is started again whenever it exits."""
        # the child's parent-death guard kills it when this thread ends
        self._thread = RestartingThread(f"host program {entry_point.name}", self._run, self._closed)

    @property
    def problem(self) -> str:
        """The reason why the program does not work; empty if no problem is known."""
        return self._thread.problem or ("" if self._supervisor is None else self._supervisor.problem)

    def close(self) -> None:
        """Ask the program to exit and wait for it; kill it if that takes too long."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        name = self._entry_point.name
        try:
            command = self._command()
        except Exception as error:  # noqa: BLE001 -- another distribution's code may fail in any way
            _logger.warning("%s cannot be started: %s: %s", name, type(error).__name__, error)
            return
        self.is_supervised = bool(command)
        if command:
            log = self._logs / f"{safe_name(name)}.log"
            self._supervisor = Supervisor(name, lambda log: self._start(command, log), log, _logger.warning)
            self._supervisor.run(self._closed)

    def _start(self, command: Sequence[str], log: Path) -> ChildProcess:
        return ChildProcess(command, log=log, environment=self._environment(), stop_s=_STOP_S)

    def _command(self) -> list[str]:
        settings = self._settings
        command = self._entry_point.load()(
            config=settings.config,
            run=settings.run_directory.root,
            host=settings.host,
            logs=self._logs,
            etcd=etcd_arguments(settings.etcd),
        )
        return [str(part) for part in command]

    def _environment(self) -> dict[str, str]:
        # one thread for numerical libraries: all cores belong to the workers
        return {**self._settings.environment, "OMP_NUM_THREADS": "1", **etcd_environment(self._settings.etcd)}


def start_host_programs(settings: ExecutorSettings) -> list[HostProgram]:
    """Start every installed host program."""
    return [
        HostProgram(entry_point, settings) for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    ]
