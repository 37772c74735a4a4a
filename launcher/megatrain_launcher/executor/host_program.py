"""Programs beside a host's workers, where a distribution that has one is installed: the streamer of the diagnosis.

Such a distribution declares an entry point in the group `megatrain.host_program`: a function of the keywords that
`_words` gives it, which returns the words of a command, none where there is nothing to run. Training does not need the
program: the log names one that cannot be started, or ends, and it is started again after a while.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
from collections.abc import Sequence

from megatrain.commands.etcd_flags import etcd_environment, etcd_words
from megatrain.contracts.run_directory import safe_name
from megatrain.coordination.lasting_thread import LastingThread
from megatrain.programs.child_process import ChildProcess
from megatrain.programs.kept_program import keep_running
from megatrain_launcher.executor.settings import ExecutorSettings

ENTRY_POINT_GROUP = "megatrain.host_program"
_logger = logging.getLogger(__name__)
_STOP_S = 5.0
"""So long a program that was asked to end may take to bring away what it has."""


class HostProgram:
    """Keeps one program running until `close`."""

    def __init__(self, entry_point: importlib.metadata.EntryPoint, settings: ExecutorSettings) -> None:
        self._entry_point = entry_point
        self._settings = settings
        self._logs = settings.logs / safe_name(settings.host)
        self._closed = threading.Event()
        self.is_kept = False
        """Whether there is a program to run, and it is kept running."""
        # the kernel ends the child when this thread does
        self._thread = LastingThread(f"host program {entry_point.name}", self._run, self._closed)

    def close(self) -> None:
        """Ask the program to end, and wait for it; it is killed when it takes too long."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        name = self._entry_point.name
        try:
            words = self._words()
        except Exception as error:  # noqa: BLE001 -- another distribution's code may fail in any way
            _logger.warning("%s cannot be started: %s: %s", name, type(error).__name__, error)
            return
        self.is_kept = bool(words)
        if words:
            keep_running(name, lambda: self._start(words), self._closed, _logger.warning)

    def _start(self, words: Sequence[str]) -> ChildProcess:
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{safe_name(self._entry_point.name)}.log"
        return ChildProcess(words, log=log, environment=self._environment(), stop_s=_STOP_S)

    def _words(self) -> list[str]:
        settings = self._settings
        words = self._entry_point.load()(
            config=settings.config,
            run=settings.run_directory.root,
            host=settings.host,
            logs=self._logs,
            etcd=etcd_words(settings.etcd),
        )
        return [str(word) for word in words]

    def _environment(self) -> dict[str, str]:
        # one thread for numerical libraries: all cores are the workers'
        return {**self._settings.environment, "OMP_NUM_THREADS": "1", **etcd_environment(self._settings.etcd)}


def start_host_programs(settings: ExecutorSettings) -> list[HostProgram]:
    """Start every installed program of hosts."""
    return [HostProgram(one, settings) for one in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)]
