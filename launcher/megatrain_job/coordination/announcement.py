"""A program's record in etcd, with a lease: etcd deletes it soon after the program exits, and the program rewrites it
when it is lost.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.record import encode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.lease_keeper import LeaseKeeper
from megatrain_job.coordination.restarting_thread import RestartingThread

_logger = logging.getLogger(__name__)
_TTL_S = 10
_RETRY_S = 2.0
_NOT_YET = "not announced yet"


class Announcement:
    """Keeps a record in etcd until `close`, and writes it again after an outage of etcd.

    consequence: what does not work while the record is missing; a part of the logged warning.
    """

    def __init__(
        self,
        client: EtcdClient,
        key: str,
        record: Any,
        *,
        name: str = "the daemon",
        consequence: str = "new hosts will not find it",
    ) -> None:
        self._client, self._key, self._value = client, key, encode(record)
        self._name, self._consequence = name, consequence
        self._closed = threading.Event()
        self.problem = _NOT_YET
        """The reason why other programs cannot find the record; empty if they can."""
        self._thread = RestartingThread(f"announcement of {name}", self._run, self._closed)

    def close(self) -> None:
        """Remove the record and end the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with LeaseKeeper(self._client, ttl_s=_TTL_S) as keeper:
                    self._client.put(self._key, self._value, lease_id=keeper.lease_id)
                    self.problem = ""
                    while not self._closed.is_set() and not keeper.wait_until_lost(_RETRY_S / 4):
                        pass
                    self.problem = keeper.lost_because
            except CoordinationError as error:
                if self.problem in ("", _NOT_YET):
                    _logger.warning("%s cannot be announced; %s: %s", self._name, self._consequence, error)
                self.problem = str(error)
                self._closed.wait(_RETRY_S)
