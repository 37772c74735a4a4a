"""Directories of a run that somebody removes while it runs: noticed within seconds, made again, and reported.

Looked at by a thread of its own: the driver must go on deciding while the run directory's storage is away.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from megatrain.config.config import Config
from megatrain.contracts.run_directory import RunDirectory
from megatrain.contracts.vanished_files import Losses, WatchedPath
from megatrain.coordination.lasting_thread import LastingThread
from megatrain_launcher.driver.checkpoint_watch import local_checkpoints

_logger = logging.getLogger(__name__)
_LOOK_S = 1.0


def watched_directories(config: Config, run: RunDirectory) -> dict[Path, str]:
    """Return what a run must not lose while it runs, each with what is lost by that, in words.

    Logs are watched where they are written: each host has its own.
    """
    found = {
        run.metrics: "the records of all steps until then are lost, the next ones are written",
        run.events: "what the diagnosis had stored is lost, what comes now is stored",
        run.diagnosis: "the diagnosis writes anew what it knows",
        run.incidents: "black boxes of broken rounds are lost; etcd has the incidents, and they are written anew",
    }
    checkpoints = local_checkpoints(config, run)
    if checkpoints is not None:
        way_out = "ask for one now by `megatrain job checkpoint`, before anything else breaks"
        found[checkpoints] = f"NO CHECKPOINT IS LEFT until the next save; {way_out}"
    return found


@dataclass(slots=True)
class _Watched:
    path: WatchedPath
    consequence: str
    trouble: str = ""
    """Why it cannot be made again."""


class RunWatch:
    """Looks while it is entered. `on_lost` is called with each path that was lost, once there is a directory again.

    Every candidate looks, so that the next driver knows what was lost; the driver logs it.
    """

    def __init__(
        self,
        directories: Mapping[Path, str],
        on_lost: Callable[[Path], None] = lambda path: None,
        is_driving: Callable[[], bool] = lambda: True,
    ) -> None:
        self._watched = [_Watched(WatchedPath(path), consequence) for path, consequence in directories.items()]
        self._on_lost, self._is_driving = on_lost, is_driving
        self._losses = Losses()
        self.has_looked = False
        """Whether what is there now is watched."""
        self._closed = threading.Event()
        self._thread: LastingThread | None = None

    @property
    def troubles(self) -> tuple[str, ...]:
        """Recent losses, and directories that cannot be made again."""
        return (*self._losses.texts, *(one.trouble for one in self._watched if one.trouble))

    def __enter__(self) -> Self:
        self._closed.clear()
        self._thread = LastingThread("run watch", self._run, self._closed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()  # storage that does not answer must not delay the end

    def _run(self) -> None:
        while not self._closed.is_set():
            for one in self._watched:
                self._look(one)
            self.has_looked = True
            self._closed.wait(_LOOK_S)
        for one in self._watched:
            one.path.close()

    def _look(self, one: _Watched) -> None:
        was_lost, path = one.path.was_lost(), one.path.path
        if not was_lost and not one.trouble:
            return
        if was_lost:
            text = self._losses.note(str(path), one.consequence)
            if self._is_driving():
                _logger.error("%s", text)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            one.trouble = f"{path} cannot be made again: {error.strerror}"
            return
        one.trouble = ""
        one.path.was_lost()  # the new one is watched from now on
        self._on_lost(path)
