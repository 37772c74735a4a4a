"""Whether the newest committed checkpoint is what a job would go on from: looked at before anybody needs it.

Only manifests and sizes of files are looked at, by a thread of its own and by the driver alone: the files may be many,
and storage slow. Checkpoints behind a URL are not looked at, for each look would cost requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from megatrain.config.config import Config
from megatrain.contracts.location import LocalLocation
from megatrain.contracts.resume_point import resume_point
from megatrain.contracts.run_directory import RunDirectory
from megatrain.coordination.lasting_thread import LastingThread

_LOOK_S = 5.0
_REST = 20.0
"""Between two looks lies so many times what a look takes: storage has other things to do."""


def local_checkpoints(config: Config, run: RunDirectory) -> Path | None:
    """Return where a run's checkpoints are on a file system, None behind a URL."""
    place = config.checkpoint.directory or str(run.checkpoints)
    return None if "://" in place else Path(place).absolute()


class CheckpointWatch:
    """Looks while it is entered, and while `is_driving`."""

    def __init__(
        self, checkpoints: Path | None, is_driving: Callable[[], bool] = lambda: True, *, look_s: float = _LOOK_S
    ) -> None:
        self._checkpoints, self._is_driving, self._look_s = checkpoints, is_driving, look_s
        self._seen = self._damage = ""
        self._closed = threading.Event()
        self._thread: LastingThread | None = None

    @property
    def damage(self) -> str:
        """Why a job would not go on from the newest committed checkpoint, and from which it would; empty if it would.

        It was seen by two looks: one may come in the middle of a removal.
        """
        return self._damage

    def __enter__(self) -> Self:
        self._closed.clear()
        if self._checkpoints is not None:
            place = LocalLocation(self._checkpoints)
            self._thread = LastingThread("checkpoint watch", lambda: self._run(place), self._closed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()  # storage that does not answer must not delay the end

    def _run(self, checkpoints: LocalLocation) -> None:
        pause_s = self._look_s
        while not self._closed.wait(pause_s):
            began_s = time.monotonic()
            before, self._seen = self._seen, resume_point(checkpoints).damage if self._is_driving() else ""
            self._damage = self._seen if self._seen == before else ""
            pause_s = max(self._look_s, _REST * (time.monotonic() - began_s))
