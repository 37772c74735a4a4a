"""Detect files that are removed while a run has them open, and report each removal for ten minutes.

A removed file accepts writes as long as it is open, but its content is lost when it is closed. So a program that writes
for hours checks whether the path still names the open file. The comparison needs the open file, because the inode
number of a removed and closed file is soon reused.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatrain.contracts.files.whole_files import MISSING_ERRORS

REPORT_S = 600.0
"""How long a removal is reported: long enough for a person to see it."""


def is_in_place(handle: int, path: Path) -> bool:
    """Return whether a path names the file or directory that is open as `handle`.

    A missing path and a stale file handle mean no. After any other error of the storage, the file counts as in place.
    """
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except MISSING_ERRORS:
        return False
    except OSError as error:
        return error.errno != errno.ESTALE  # a network file system's error for an open file that was removed


class WatchedPath:
    """Detects that the file at a path was removed or replaced. For use by one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = -1

    def was_lost(self) -> bool:
        """Return whether the file of the last check is gone. From now on, the path's current file is watched.

        A file that did not exist at the first check is not a removal.
        """
        was_lost = self._handle >= 0 and not is_in_place(self._handle, self.path)
        if was_lost:
            self.close()
        if self._handle < 0:
            with suppress(OSError):
                # O_PATH only refers to the file: a FIFO does not block, and read permission is not needed
                self._handle = os.open(self.path, os.O_PATH | os.O_CLOEXEC)
        return was_lost

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class RecentRemovals:
    """Recent removals of files, as sentences. Thread-safe."""

    def __init__(self, unix_time: Callable[[], float] = time.time) -> None:
        self._unix_time = unix_time
        self._lock = threading.Lock()
        self._recent: dict[str, tuple[float, str]] = {}

    def record(self, what: str, consequence: str) -> str:
        """Record that `what` was just removed, and return the sentence that reports it.

        `consequence`: what is lost by the removal, and what continues.
        """
        now_s = self._unix_time()
        text = f"{what} was removed from outside at {time.strftime('%H:%M:%S', time.gmtime(now_s))} UTC: {consequence}"
        with self._lock:
            self._recent[what] = (now_s, text)
        return text

    @property
    def texts(self) -> tuple[str, ...]:
        """The sentences of the last ten minutes, only the newest one of each `what`."""
        oldest_s = self._unix_time() - REPORT_S
        with self._lock:
            self._recent = {what: removal for what, removal in self._recent.items() if removal[0] > oldest_s}
            return tuple(text for _, text in self._recent.values())
