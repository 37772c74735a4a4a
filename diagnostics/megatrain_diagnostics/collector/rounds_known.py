"""Which rounds exist, for the collector: the possible ranks, and the round that trains."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from megatrain_diagnostics.events.tables import Ranks

MAX_RANKS = 1 << 20
_MAX_AHEAD = 64
"""Hosts may see a new round before the daemon does; no more rounds than this begin in that time."""
_MAX_ROUNDS = 10_000
_ANY = 2**31 - 1


class KnownRounds:
    """Rounds from etcd where it has any; else from the ranks themselves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._world_sizes: dict[int, int] = {}
        self._newest_in_etcd = -1
        self._newest_seen = -1

    def note(self, number: int, world_size: int) -> None:
        """Note a round of etcd."""
        with self._lock:
            self._world_sizes[number] = world_size
            self._newest_in_etcd = max(self._newest_in_etcd, number)
            while len(self._world_sizes) > _MAX_ROUNDS:
                del self._world_sizes[min(self._world_sizes)]

    def note_ranks(self, ranks: Ranks) -> None:
        """Note the rounds that ranks report; they count only while etcd has none."""
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
        """The newest round in etcd; any round is possible while etcd has none."""
        with self._lock:
            return self._newest_in_etcd if self._newest_in_etcd >= 0 else _ANY

    @property
    def latest_possible(self) -> int:
        """The greatest round that a row may have."""
        with self._lock:
            return self._newest_in_etcd + _MAX_AHEAD if self._newest_in_etcd >= 0 else _ANY

    def world_sizes(self) -> Mapping[int, int]:
        """Return the ranks of each round in etcd."""
        with self._lock:
            return dict(self._world_sizes)
