"""The newest topics of the job, for all senders: one thread reads etcd for any number of receivers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatrain.contracts.records.job_keys import JobKeys
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_job.jobs.assessment import assess
from megatrain_job.jobs.health import ReasonCode
from megatrain_job.jobs.snapshot import DecodedRecords, read_job
from megatrain_launcher.notify.job_topics import topics_of
from megatrain_launcher.notify.message import PageLinks
from megatrain_launcher.notify.topics import Topic

_PERIOD_S = 1.0
_PART_BUSY = 5.0
"""Pause between two reads without a signal of a change: a second, or a multiple of the time that the last read took,
whichever is longer."""


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """The topics to report at one moment. `number` increases with each read."""

    number: int
    topics: tuple[Topic, ...]
    links: PageLinks
    left_s: float | None = None
    """Set in the last snapshot of a job that is over: the seconds that senders have to report it."""

    @property
    def is_last(self) -> bool:
        return self.left_s is not None


class ReadTopics(Protocol):
    """Reads the job. Raises: CoordinationError."""

    def __call__(self, number: int) -> TopicSnapshot: ...


class TopicReader:
    """Reads a job in etcd. Not thread-safe."""

    def __init__(self, client: EtcdClient, keys: JobKeys, links: PageLinks, clock: Callable[[], float]) -> None:
        self._client, self._keys, self._links, self._clock = client, keys, links, clock
        self._decoded = DecodedRecords()
        self._first_seen: dict[ReasonCode, float] = {}

    def __call__(self, number: int) -> TopicSnapshot:
        """Raises: CoordinationError."""
        snapshot = read_job(self._client, self._keys, decoded=self._decoded)
        now_s = self._clock()
        health = assess(snapshot, now_s).health
        self._first_seen = {reason.code: self._first_seen.get(reason.code, now_s) for reason in health.reasons}
        links = PageLinks(self._links.page or snapshot.dashboard_url, self._links.runbooks)
        return TopicSnapshot(number, topics_of(snapshot, health, self._first_seen, now_s), links)


class TopicFollower:
    """Keeps the newest snapshot of the topics until `close`. One thread calls `read`."""

    def __init__(self, read: ReadTopics, clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._changed = threading.Condition()
        self._newest: TopicSnapshot | None = None
        self._is_due = True
        self._last_s: float | None = None
        self._closed = threading.Event()
        self._thread = RestartingThread("notices", self._run, self._closed)

    @property
    def problem(self) -> str:
        return self._thread.problem

    def wake(self) -> None:
        """Read at once, because something has happened. Never waits."""
        with self._changed:
            self._is_due = True
            self._changed.notify_all()

    def finish(self, last_s: float) -> None:
        """Read for the last time; senders have `last_s` seconds to send the result."""
        with self._changed:
            self._last_s = last_s
        self.wake()

    def close(self) -> None:
        self._closed.set()
        self.wake()

    def next(self, seen: int, wake_unix_s: float, closed: threading.Event) -> TopicSnapshot | None:
        """Wait for a snapshot newer than number `seen`, at most until a given time unless `seen` is 0. Return the
        newest snapshot, None when closed.
        """

        def is_over() -> bool:
            newest = self._newest
            return closed.is_set() or (newest is not None and newest.number > seen)

        with self._changed:
            self._changed.wait_for(is_over, max(0.0, wake_unix_s - self._clock()) if seen else None)
            return None if closed.is_set() else self._newest

    def _run(self) -> None:
        busy_s = 0.0
        while not self._closed.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._is_due, max(_PERIOD_S, _PART_BUSY * busy_s))
                self._is_due = False
                last_s = self._last_s
                number = 0 if self._newest is None else self._newest.number
            if self._closed.is_set():
                return
            began_s = time.monotonic()
            try:
                found = self._read(number + 1)
            except Exception:
                self.wake()  # the signaled change has not been read yet
                raise
            busy_s = time.monotonic() - began_s
            if last_s is not None:
                found = TopicSnapshot(found.number, found.topics, found.links, last_s)
            with self._changed:
                self._newest = found
                self._changed.notify_all()
            if last_s is not None:
                return
