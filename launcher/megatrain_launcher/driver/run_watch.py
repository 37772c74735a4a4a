"""Detects within seconds that a directory of the run was removed; creates it again and reports the loss.

A separate thread checks, because the driver must continue to decide while the run directory's storage is unavailable.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megatrain.config.config import Config
from megatrain.contracts.closable import Closable
from megatrain.contracts.files.vanished_files import RecentRemovals, WatchedPath
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_launcher.driver.resume_point_watch import local_checkpoints

_logger = logging.getLogger(__name__)
_POLL_S = 1.0


def watched_directories(config: Config, run: RunDirectory) -> dict[Path, str]:
    """Return the directories that a run needs, each with a text about the consequence of its removal.

    The log directories are not included: each host watches its own.
    """
    found = {
        run.metrics: "the records of the earlier steps are lost; later steps are recorded",
        run.events: "the events stored so far are lost; new ones are stored",
        run.diagnosis: "the diagnosis writes its files again",
        run.incidents: "black boxes of broken rounds are lost; the incidents are written again from etcd",
    }
    checkpoints = local_checkpoints(config, run)
    if checkpoints is not None:
        hint = "request one now with `megatrain job checkpoint`, before anything else fails"
        found[checkpoints] = f"NO CHECKPOINT IS LEFT until the next save; {hint}"
    return found


@dataclass(slots=True)
class _Watched:
    path: WatchedPath
    consequence: str
    problem: str = ""
    """The reason why the directory cannot be created again; empty if it can."""


class RunWatch(Closable):
    """A context manager that checks inside its block. Calls `on_lost` with each lost directory after creating it again.

    Runs on every driver candidate, so that the next driver can also report earlier removals; only the driver logs them.
    """

    def __init__(
        self,
        directories: Mapping[Path, str],
        on_lost: Callable[[Path], None] = lambda path: None,
        is_driving: Callable[[], bool] = lambda: True,
    ) -> None:
        self._watched = [_Watched(WatchedPath(path), consequence) for path, consequence in directories.items()]
        self._on_lost, self._is_driving = on_lost, is_driving
        self._removals = RecentRemovals()
        self.has_polled = False
        """Whether every directory has been checked at least once."""
        self._closed = threading.Event()
        self._thread: RestartingThread | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Recent removals, and directories that cannot be recreated."""
        return (*self._removals.texts, *(watched.problem for watched in self._watched if watched.problem))

    def __enter__(self) -> Self:
        self._closed.clear()
        self._thread = RestartingThread("run watch", self._run, self._closed)
        return self

    def close(self) -> None:
        self._closed.set()  # no join: unresponsive storage must not delay the exit

    def _run(self) -> None:
        while not self._closed.is_set():
            for watched in self._watched:
                self._poll(watched)
            self.has_polled = True
            self._closed.wait(_POLL_S)
        for watched in self._watched:
            watched.path.close()

    def _poll(self, watched: _Watched) -> None:
        was_lost, path = watched.path.was_lost(), watched.path.path
        if not was_lost and not watched.problem:
            return
        if was_lost:
            text = self._removals.record(str(path), watched.consequence)
            if self._is_driving():
                _logger.error("%s", text)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            watched.problem = f"{path} cannot be created again: {error.strerror}"
            return
        watched.problem = ""
        watched.path.was_lost()  # watch the new directory from now on
        self._on_lost(path)
