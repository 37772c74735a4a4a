"""Where the daemon is: its record in etcd, followed by a watch; or a record that does not change."""

from __future__ import annotations

import threading
from typing import Protocol

from megatrain.contracts.diag_records import DaemonRecord
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import decode
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.follower import Follower
from megatrain.coordination.watch import WatchEvent
from megatrain.coordination.wire import KeyRange, KeyValue


class DaemonFinder(Protocol):
    """Whatever knows the daemon's record."""

    def find(self) -> DaemonRecord | None:
        """Return the newest record, None when there is no daemon. Never blocks."""

    def wait(self, timeout_s: float) -> None:
        """Return when the record may have changed, or after the time."""


class FixedDaemon:
    """A record that somebody else knows, and may replace."""

    def __init__(self, record: DaemonRecord | None) -> None:
        self._record = record
        self._changed = threading.Event()

    def replace(self, record: DaemonRecord | None) -> None:
        self._record = record
        self._changed.set()

    def find(self) -> DaemonRecord | None:
        return self._record

    def wait(self, timeout_s: float) -> None:
        self._changed.wait(timeout_s)
        self._changed.clear()


class WatchedDaemon:
    """Follows the daemon's record of a job until `close`.

    A record that goes is still tried: its lease may have run out because etcd was away, and the daemon with its streams
    goes on without etcd.
    """

    def __init__(self, client: EtcdClient, keys: JobKeys) -> None:
        self._key = keys.daemon
        self._record: DaemonRecord | None = None
        self._trouble = ""
        self._changed = threading.Event()
        self._follower = Follower(client, KeyRange.key(keys.daemon), self._take)

    @property
    def trouble(self) -> str:
        """Why the record is not known; empty when all is well."""
        return self._trouble or self._follower.trouble

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
            self._trouble = ""
        except CoordinationError as error:
            self._trouble = str(error)
