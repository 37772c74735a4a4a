"""The daemon's record in etcd, leased: there while it lives, gone soon after it died, written again when lost."""

from __future__ import annotations

import logging
import threading

from megatrain.contracts.diag_records import DaemonRecord
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.record import encode
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.lease_keeper import LeaseKeeper

_logger = logging.getLogger(__name__)
_TTL_S = 10
_RETRY_S = 2.0


class Announcement:
    """Keeps a record in place until `close`, through outages of etcd."""

    def __init__(self, client: EtcdClient, key: str, record: DaemonRecord, *, ttl_s: int = _TTL_S) -> None:
        self._client, self._key, self._value, self._ttl_s = client, key, encode(record), ttl_s
        self._closed = threading.Event()
        self.trouble = "not announced yet"
        """Why hosts cannot find the daemon; empty when all is well."""
        self._thread = threading.Thread(target=self._run, name="daemon's announcement", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the record away and end."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with LeaseKeeper(self._client, ttl_s=self._ttl_s) as keeper:
                    self._client.put(self._key, self._value, lease_id=keeper.lease_id)
                    self.trouble = ""
                    while not self._closed.is_set() and not keeper.wait_until_lost(_RETRY_S / 4):
                        pass
                    self.trouble = keeper.lost_because
            except CoordinationError as error:
                if not self.trouble or self.trouble == "not announced yet":
                    _logger.warning("the daemon cannot be announced, new hosts will not find it: %s", error)
                self.trouble = str(error)
                self._closed.wait(_RETRY_S)
