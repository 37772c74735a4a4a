"""Which rounds there are, for the collector: what rank may be, and which one trains."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from megatrain_diagnostics.events.tables import Ranks

MAX_RANKS = 1 << 20
_MAX_AHEAD = 64
"""Hosts may see a new round before the daemon does; more rounds than this at once there are not."""
_MAX_ROUNDS = 10_000
_ANY = 2**31 - 1


class KnownRounds:
    """From etcd where there is one; else from the ranks themselves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._world_sizes: dict[int, int] = {}
        self._newest_told = -1
        self._newest_seen = -1

    def note(self, number: int, world_size: int) -> None:
        """Take a round from etcd."""
        with self._lock:
            self._world_sizes[number] = world_size
            self._newest_told = max(self._newest_told, number)
            while len(self._world_sizes) > _MAX_ROUNDS:
                del self._world_sizes[min(self._world_sizes)]

    def note_ranks(self, ranks: Ranks) -> None:
        """Take what ranks say of themselves: it counts for as long as etcd has said nothing."""
        if len(ranks.round):
            with self._lock:
                self._newest_seen = max(self._newest_seen, int(ranks.round.max()))

    @property
    def newest(self) -> int:
        """The newest round; -1: none is known."""
        with self._lock:
            return self._newest_told if self._newest_told >= 0 else self._newest_seen

    @property
    def latest_told(self) -> int:
        """The newest round in etcd; any round is possible while etcd has none."""
        with self._lock:
            return self._newest_told if self._newest_told >= 0 else _ANY

    @property
    def latest_possible(self) -> int:
        """The greatest round that a row may have."""
        with self._lock:
            return self._newest_told + _MAX_AHEAD if self._newest_told >= 0 else _ANY

    def world_sizes(self) -> Mapping[int, int]:
        """Return the ranks of each round in etcd."""
        with self._lock:
            return dict(self._world_sizes)
