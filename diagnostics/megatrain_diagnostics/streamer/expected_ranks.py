"""Which ranks this host has in the newest round, as the driver wrote it: those that leave no trace are known by it."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import decode
from megatrain.contracts.rounds import Round
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.watch import ChangeKind, Snapshot, Watch
from megatrain.coordination.wire import KeyRange, KeyValue

_logger = logging.getLogger(__name__)
_AGAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class HostRanks:
    """The ranks of a host in a round; `seen_s` is when this program heard of it, monotonic."""

    round: int
    ranks: range
    seen_s: float


class ExpectedRanks:
    """Follows the rounds of a job until `close`."""

    def __init__(self, client: EtcdClient, keys: JobKeys, host: str) -> None:
        self._client, self._keys, self._host = client, keys, host
        self._newest = HostRanks(0, range(0), 0.0)
        self._closed = threading.Event()
        self._watch = self._watched()
        self._thread = threading.Thread(target=self._run, name="rounds", daemon=True)
        self._thread.start()

    def newest(self) -> HostRanks:
        """Return the host's part in the newest round; no ranks where it has none."""
        return self._newest

    def close(self) -> None:
        self._closed.set()
        self._watch.close()
        self._thread.join()

    def _watched(self) -> Watch:
        return Watch(self._client, KeyRange.prefix(self._keys.directory("rounds")))

    def _run(self) -> None:
        while not self._closed.is_set() and not self._client.gateway.is_closed:
            try:
                for event in self._watch:
                    items = event.items if isinstance(event, Snapshot) else [
                        change.item for change in event.changes if change.kind is ChangeKind.PUT
                    ]  # fmt: skip
                    for item in items:
                        self._take(item)
            except CoordinationError as error:
                _logger.warning("rounds cannot be heard: %s", error)
            if not self._closed.wait(_AGAIN_S):
                self._watch.close()
                self._watch = self._watched()
        self._watch.close()  # one that was opened while `close` closed the one before

    def _take(self, item: KeyValue) -> None:
        try:
            found = decode(Round, item.value, item.key.decode(errors="replace"))
        except CoordinationError as error:
            _logger.warning("a round cannot be read: %s", error)
            return
        if found.number > self._newest.round:
            ranks = [range(part.first_rank, part.first_rank + part.num_workers)
                     for part in found.hosts if part.host == self._host]  # fmt: skip
            self._newest = HostRanks(found.number, ranks[0] if ranks else range(0), time.monotonic())
