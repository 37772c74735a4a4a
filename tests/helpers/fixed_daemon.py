"""A DaemonFinder without etcd."""

from __future__ import annotations

import threading

from megatrain.contracts.records.diag_records import DaemonRecord


class FixedDaemon:
    """A fixed record of a daemon, which the test can replace."""

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
