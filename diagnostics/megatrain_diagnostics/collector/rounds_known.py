"""Follows the job's rounds and its record in etcd, for the collector.

The rounds define which ranks are possible, and which round is training; the record has the configuration.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import JobRecord, Round
from megatrain_diagnostics.events.tables import Ranks
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.follower import Follower
from megatrain_job.coordination.watch_event import WatchEvent
from megatrain_job.coordination.wire import KeyRange, KeyValue

MAX_RANKS = 1 << 20
_MAX_AHEAD = 64
"""Number of rounds by which a host may be ahead of the daemon."""
_MAX_ROUNDS = 10_000
_ANY = 2**31 - 1
_logger = logging.getLogger(__name__)


class KnownRounds:
    """The rounds in etcd; while etcd has none, those that the ranks report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._world_sizes: dict[int, int] = {}
        self._newest_in_etcd = -1
        self._newest_seen = -1

    def add(self, number: int, world_size: int) -> None:
        """Add a round from etcd."""
        with self._lock:
            self._world_sizes[number] = world_size
            self._newest_in_etcd = max(self._newest_in_etcd, number)
            while len(self._world_sizes) > _MAX_ROUNDS:
                del self._world_sizes[min(self._world_sizes)]

    def add_ranks(self, ranks: Ranks) -> None:
        """Add the rounds that ranks report; they are used only while etcd has none."""
        if len(ranks.round):
            with self._lock:
                self._newest_seen = max(self._newest_seen, int(ranks.round.max()))

    @property
    def newest(self) -> int:
        """The newest round; -1: none is known."""
        with self._lock:
            return self._newest_in_etcd if self._newest_in_etcd >= 0 else self._newest_seen

    @property
    def latest_in_etcd(self) -> int:
        """The newest round in etcd; 2^31 - 1 while etcd has none, because any round is possible then."""
        with self._lock:
            return self._newest_in_etcd if self._newest_in_etcd >= 0 else _ANY

    @property
    def latest_possible(self) -> int:
        """The greatest round that a row may have."""
        with self._lock:
            return self._newest_in_etcd + _MAX_AHEAD if self._newest_in_etcd >= 0 else _ANY

    def world_sizes(self) -> Mapping[int, int]:
        """Return the world size of each round in etcd."""
        with self._lock:
            return dict(self._world_sizes)


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
        self._rounds.add(found.number, found.world_size)

    def _take_record(self, item: KeyValue) -> None:
        self._on_record(decode(JobRecord, item.value, item.key.decode(errors="replace")))


def _take_each(take: Callable[[KeyValue], None], event: WatchEvent) -> None:
    for item in event.written:
        try:
            take(item)
        except CoordinationError as error:
            _logger.warning("skipped: %s", error)
