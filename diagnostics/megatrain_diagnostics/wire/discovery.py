"""Finds the daemon's address: watches the daemon's record in etcd."""

from __future__ import annotations

import threading
from typing import Protocol

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.diag_records import DaemonRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.follower import Follower
from megatrain_job.coordination.watch_event import WatchEvent
from megatrain_job.coordination.wire import KeyRange, KeyValue


class DaemonFinder(Protocol):
    """A source of the daemon's record."""

    def find(self) -> DaemonRecord | None:
        """Return the newest record that was seen; None if there was none yet. Never blocks."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the record may have changed, or `timeout_s` has passed."""


class WatchedDaemon:
    """Follows the daemon's record of a job until `close`.

    The last record is still used after its removal: its lease may have expired while etcd was unavailable, and the
    daemon and its streams continue without etcd.
    """

    def __init__(self, client: EtcdClient, keys: JobKeys) -> None:
        self._key = keys.daemon
        self._record: DaemonRecord | None = None
        self._problem = ""
        self._changed = threading.Event()
        self._follower = Follower(client, KeyRange.key(keys.daemon), self._take)

    @property
    def problem(self) -> str:
        """The reason why the newest record may not be known; empty if there is none."""
        return self._problem or self._follower.problem

    def find(self) -> DaemonRecord | None:
        return self._record

    def wait(self, timeout_s: float) -> None:
        self._changed.wait(timeout_s)
        self._changed.clear()

    def close(self) -> None:
        self._follower.close()
        self._changed.set()

    def _take(self, event: WatchEvent) -> None:
        for item in event.written:
            self._take_record(item)
        self._changed.set()

    def _take_record(self, item: KeyValue) -> None:
        try:
            self._record = decode(DaemonRecord, item.value, self._key)
            self._problem = ""
        except CoordinationError as error:
            self._problem = str(error)
