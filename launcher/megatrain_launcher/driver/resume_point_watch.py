"""Checks continuously whether a job can resume from its newest committed checkpoint, before a resume is needed.

A thread of the driver checks manifests and file sizes, but not contents, because there may be many files and storage
may be slow. Checkpoints at a URL are not checked, because each check would cost requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.resume_point import resume_point
from megatrain.config.config import Config
from megatrain.contracts.closable import Closable
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.coordination.restarting_thread import RestartingThread

_POLL_S = 5.0
_REST = 20.0
"""The pause between two checks, as a multiple of a check's duration, to limit the load on storage."""


def local_checkpoints(config: Config, run: RunDirectory) -> Path | None:
    """Return the directory of a run's checkpoints; None if they are at a URL."""
    location = config.checkpoint.directory or str(run.checkpoints)
    return None if "://" in location else Path(location).absolute()


class ResumePointWatch(Closable):
    """A context manager that checks inside its block, while `is_driving` returns True."""

    def __init__(
        self, checkpoints: Path | None, is_driving: Callable[[], bool] = lambda: True, *, poll_s: float = _POLL_S
    ) -> None:
        self._checkpoints, self._is_driving, self._poll_s = checkpoints, is_driving, poll_s
        self._seen = self._damage = ""
        self._closed = threading.Event()
        self._thread: RestartingThread | None = None

    @property
    def damage(self) -> str:
        """The reason why the newest checkpoint is unusable, and which one would be used; empty if it is usable.

        Two consecutive checks must agree, because a checkpoint that is being removed appears damaged.
        """
        return self._damage

    def __enter__(self) -> Self:
        self._closed.clear()
        if self._checkpoints is not None:
            location = LocalLocation(self._checkpoints)
            self._thread = RestartingThread("checkpoint watch", lambda: self._run(location), self._closed)
        return self

    def close(self) -> None:
        self._closed.set()  # no join: unresponsive storage must not delay the exit

    def _run(self, checkpoints: LocalLocation) -> None:
        pause_s = self._poll_s
        while not self._closed.wait(pause_s):
            began_s = time.monotonic()
            before, self._seen = self._seen, resume_point(checkpoints).damage if self._is_driving() else ""
            self._damage = self._seen if self._seen == before else ""
            pause_s = max(self._poll_s, _REST * (time.monotonic() - began_s))
