"""A consumer of a watch that restarts after any failure, and reports for how long it may have missed events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from megatrain.contracts.closable import Closable
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_job.coordination.watch import Watch
from megatrain_job.coordination.watch_event import WatchEvent
from megatrain_job.coordination.wire import KeyRange


class Follower(Closable):
    """Passes each event of a range to `take`, in a separate thread, until `close`.

    The first event, and the first one after `take` failed or etcd refused the watch, is a Snapshot, which replaces
    earlier content. A Snapshot also comes if etcd no longer has the next revision; other failures lose no event.
    """

    def __init__(self, client: EtcdClient, keys: KeyRange, take: Callable[[WatchEvent], None]) -> None:
        self._client = client
        self._keys = keys
        self._take = take
        self._lock = threading.Lock()
        self._watch: Watch | None = None
        self._confirmed_at = time.monotonic()
        self._taken_since: float | None = None
        self._closed = threading.Event()
        self._thread = RestartingThread(f"follower of {keys}", self._follow, self._closed)

    @property
    def problem(self) -> str:
        """The reason why no events can be received at the moment; empty if they can."""
        watch = self._watch
        if watch is not None and watch.confirmed_at is not None:
            return watch.problem
        return self._thread.problem or (watch.problem if watch is not None else "")

    @property
    def unconfirmed_s(self) -> float:
        """For how many seconds events may have been missed, or left unprocessed."""
        watch, taken_since = self._watch, self._taken_since
        confirmed_at = self._confirmed_at if watch is None else max(self._confirmed_at, watch.confirmed_at or 0.0)
        return time.monotonic() - (confirmed_at if taken_since is None else min(confirmed_at, taken_since))

    def close(self) -> None:
        """End the thread, and wait until the current event is processed."""
        self._closed.set()
        with self._lock:
            watch = self._watch
        if watch is not None:
            watch.close()
        if not self._thread.is_current:
            self._thread.join()

    def _follow(self) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            watch = self._watch = Watch(self._client, self._keys)
        try:
            for event in watch:
                self._taken_since = time.monotonic()
                self._take(event)
                self._taken_since = None
        finally:
            watch.close()
            if self._taken_since is None:  # otherwise processing an event failed
                self._confirmed_at = max(self._confirmed_at, watch.confirmed_at or 0.0)
            self._watch = self._taken_since = None
