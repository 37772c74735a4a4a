"""Follows the daemon's job in etcd: the rounds, and the record with the configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import JobRecord, Round
from megatrain_diagnostics.collector.rounds_known import KnownRounds
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.follower import Follower
from megatrain_job.coordination.watch import WatchEvent
from megatrain_job.coordination.wire import KeyRange, KeyValue

_logger = logging.getLogger(__name__)


class JobWatch:
    """Follows a job until `close`. `on_record` is called from its thread with each readable record."""

    def __init__(
        self, client: EtcdClient, keys: JobKeys, rounds: KnownRounds, on_record: Callable[[JobRecord], None]
    ) -> None:
        self._rounds, self._on_record = rounds, on_record
        self._followers = [
            Follower(client, KeyRange.prefix(keys.directory("rounds")), partial(_take_each, self._take_round)),
            Follower(client, KeyRange.key(keys.record), partial(_take_each, self._take_record)),
        ]

    def close(self) -> None:
        for follower in self._followers:
            follower.close()

    def _take_round(self, item: KeyValue) -> None:
        found = decode(Round, item.value, item.key.decode(errors="replace"))
        self._rounds.note(found.number, found.world_size)

    def _take_record(self, item: KeyValue) -> None:
        self._on_record(decode(JobRecord, item.value, item.key.decode(errors="replace")))


def _take_each(take: Callable[[KeyValue], None], event: WatchEvent) -> None:
    for item in event.written:
        try:
            take(item)
        except CoordinationError as error:
            _logger.warning("skipped: %s", error)
