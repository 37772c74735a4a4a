"""What the daemon follows of its job in etcd: the rounds, and the record with the configuration."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from megatrain.contracts.errors import CoordinationError, CoordinationRefusedError
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import decode
from megatrain.contracts.rounds import JobRecord, Round
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.watch import ChangeKind, Snapshot, Watch
from megatrain.coordination.wire import KeyRange, KeyValue
from megatrain_diagnostics.collector.rounds_known import KnownRounds

_logger = logging.getLogger(__name__)


class JobWatch:
    """Follows a job until `close`. `on_record` is called from its thread with each record that can be read."""

    def __init__(
        self, client: EtcdClient, keys: JobKeys, rounds: KnownRounds, on_record: Callable[[JobRecord], None]
    ) -> None:
        self._rounds, self._on_record = rounds, on_record
        self._watches = {
            Watch(client, KeyRange.prefix(keys.directory("rounds"))): self._take_round,
            Watch(client, KeyRange.key(keys.record)): self._take_record,
        }
        self._threads = [
            threading.Thread(target=self._run, args=pair, name=f"follows {pair[0].keys}", daemon=True)
            for pair in self._watches.items()
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
        for thread in self._threads:
            thread.join()

    def _run(self, watch: Watch, take: Callable[[KeyValue], None]) -> None:
        try:
            for event in watch:
                if isinstance(event, Snapshot):
                    items = list(event.items)
                else:
                    items = [change.item for change in event.changes if change.kind is ChangeKind.PUT]
                for item in items:
                    try:
                        take(item)
                    except CoordinationError as error:
                        _logger.warning("passed over: %s", error)
        except CoordinationRefusedError as error:
            _logger.error("the daemon may not read its job: %s", error)

    def _take_round(self, item: KeyValue) -> None:
        found = decode(Round, item.value, item.key.decode(errors="replace"))
        self._rounds.note(found.number, found.world_size)

    def _take_record(self, item: KeyValue) -> None:
        self._on_record(decode(JobRecord, item.value, item.key.decode(errors="replace")))
