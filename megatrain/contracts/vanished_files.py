"""Files that somebody removes while a run has them open: noticed, and reported for a while.

A removed file accepts writes as long as it is open, and nothing can ever read them. So a program that writes for hours
asks whether the path still names what is open. Comparing needs the open file: the number of an inode that is gone is
soon another's.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatrain.contracts.whole_files import MISSING_ERRORS

TOLD_S = 600.0
"""How long a loss is reported: long enough for a person to see it."""


def is_in_place(handle: int, path: Path) -> bool:
    """Say whether a path names the file or directory that is open as `handle`.

    Storage that does not answer as it should says nothing: then it counts as in place.
    """
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except MISSING_ERRORS:
        return False
    except OSError as error:
        return error.errno != errno.ESTALE  # what a network file system says of an open file that is gone


class WatchedPath:
    """Notices that what a path names was removed, or that another took its place. For one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = -1

    def was_lost(self) -> bool:
        """Say whether what was there at the last look is not there any more; what is there now is watched from now on.

        What was not there at the first look is no loss.
        """
        was_lost = self._handle >= 0 and not is_in_place(self._handle, self.path)
        if was_lost:
            self.close()
        if self._handle < 0:
            with suppress(OSError):
                # it is only named, not opened: no FIFO keeps us, and no right to read it is needed
                self._handle = os.open(self.path, os.O_PATH | os.O_CLOEXEC)
        return was_lost

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class Losses:
    """What was lost lately, in sentences. For any threads."""

    def __init__(self, unix_time: Callable[[], float] = time.time) -> None:
        self._unix_time = unix_time
        self._lock = threading.Lock()
        self._told: dict[str, tuple[float, str]] = {}

    def note(self, what: str, consequence: str) -> str:
        """Record that `what` was removed just now, and return the sentence that reports it.

        `consequence`: what is lost by that, and what goes on.
        """
        now_s = self._unix_time()
        text = f"{what} was removed by somebody at {time.strftime('%H:%M:%S', time.gmtime(now_s))} UTC: {consequence}"
        with self._lock:
            self._told[what] = (now_s, text)
        return text

    @property
    def texts(self) -> tuple[str, ...]:
        """The sentences of the last ten minutes, the newest of each path."""
        least_s = self._unix_time() - TOLD_S
        with self._lock:
            self._told = {what: told for what, told in self._told.items() if told[0] > least_s}
            return tuple(text for _, text in self._told.values())
