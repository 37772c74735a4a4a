"""Watches a run's checkpoints in a separate thread, because storage may be slow or unavailable.

A survey reads all manifests, so it is made only if a directory has changed since the last one. At a URL no change can
be seen, so the survey is made once a minute.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatrain.checkpoint.survey import survey
from megatrain.checkpoint_format.url_location import open_location
from megatrain.checkpoint_format.verifications import VERIFIED_NAME
from megatrain.contracts.errors import CheckpointError
from megatrain_dashboard.sources.facts import CheckpointsSeen

_PERIOD_S = 5.0
_FAR_PERIOD_S = 60.0
_MAX_SHOWN_ERROR = 500

_Signature = tuple[tuple[str, int], ...]


class CheckpointWatch:
    """Watches until `close`."""

    def __init__(
        self, location: Callable[[], str], changed: Callable[[], None], *, period_s: float = _PERIOD_S
    ) -> None:
        """`location`: returns the path or URL of the checkpoints. `changed`: called when a poll has found a change."""
        self._location, self._changed, self._period_s = location, changed, period_s
        self._seen = CheckpointsSeen(location())
        self._signature: _Signature | None = None
        self.has_polled = threading.Event()
        """Set after the first poll."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoints of the run", daemon=True)
        self._thread.start()

    @property
    def seen(self) -> CheckpointsSeen:
        return self._seen

    def close(self) -> None:
        """End the thread. If storage blocks it, it ends with the process."""
        self._closed.set()
        self._thread.join(self._period_s)

    def _run(self) -> None:
        while True:
            location = self._location()
            is_far = "://" in location
            self._poll(location, is_far=is_far)
            self.has_polled.set()
            if self._closed.wait(_FAR_PERIOD_S if is_far else self._period_s):
                return

    def _poll(self, location: str, *, is_far: bool) -> None:
        signature = None if is_far else _signature(Path(location))
        if signature is not None and signature == self._signature and self._seen.location == location:
            return
        seen = read_checkpoints(location)
        # the signature is from before the survey, so the next poll sees changes that were made during it
        self._signature = signature if not seen.problem else None
        if seen != self._seen:
            self._seen = seen
            self._changed()


def read_checkpoints(location: str) -> CheckpointsSeen:
    """Return all checkpoints below a path or URL, or why they cannot be listed."""
    try:
        return CheckpointsSeen(location, survey(open_location(location)))
    except (CheckpointError, OSError) as error:
        return CheckpointsSeen(location, problem=str(error)[:_MAX_SHOWN_ERROR])


def _signature(checkpoints: Path) -> _Signature:
    """Return when each directory last changed: a commit, a pin, a removal or a verification changes one of them."""
    found: list[tuple[str, int]] = []
    with suppress(OSError):
        found.append((VERIFIED_NAME, (checkpoints / VERIFIED_NAME).stat().st_mtime_ns))
    pending = [(str(checkpoints), 0)]
    while pending:
        path, depth = pending.pop()
        try:
            found.append((path, os.stat(path).st_mtime_ns))
            if depth < 2:
                with os.scandir(path) as entries:
                    pending += [(entry.path, depth + 1) for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
    return tuple(sorted(found))
