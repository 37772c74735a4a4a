"""Finds the silent ranks of this host: those without a black box, or without progress for longer than their phase
may take.

The driver's record of the newest round names the ranks of this host, so that ranks without a black box are found too.
The executor uses the same time limits (megatrain.fencing.phase_timeouts).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import Round
from megatrain.fencing.phase_timeouts import PhaseTimeouts, find_stall
from megatrain_diagnostics.streamer.rank_tail import RankTail
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.follower import Follower
from megatrain_job.coordination.watch_event import WatchEvent
from megatrain_job.coordination.wire import KeyRange, KeyValue

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostRanks:
    """The ranks of a host in a round; `seen_s` is when this program received the round, monotonic."""

    round: int
    ranks: range
    seen_s: float


class ExpectedRanks:
    """Follows the rounds of a job until `close`."""

    def __init__(self, client: EtcdClient, keys: JobKeys, host: str) -> None:
        self._host = host
        self._newest = HostRanks(0, range(0), 0.0)
        self._follower = Follower(client, KeyRange.prefix(keys.directory("rounds")), self._take)

    def newest(self) -> HostRanks:
        """Return the host's ranks in the newest round; an empty range if it has none."""
        return self._newest

    def close(self) -> None:
        self._follower.close()

    def _take(self, event: WatchEvent) -> None:
        for item in event.written:
            self._take_round(item)

    def _take_round(self, item: KeyValue) -> None:
        try:
            found = decode(Round, item.value, item.key.decode(errors="replace"))
        except CoordinationError as error:
            _logger.warning("a round cannot be read: %s", error)
            return
        if found.number > self._newest.round:
            ranks = next((part.ranks for part in found.hosts if part.host == self._host), range(0))
            self._newest = HostRanks(found.number, ranks, time.monotonic())


class SilenceWatch:
    """Finds silent ranks of the newest round. For one thread."""

    def __init__(self, phase_timeouts: PhaseTimeouts) -> None:
        self._phase_timeouts = phase_timeouts
        self._suspected: tuple[int, ...] = ()

    def silent(self, tails: Sequence[RankTail], expected: HostRanks) -> tuple[int, ...]:
        """Return the ranks that are silent in this and the previous call; a pause of the machine affects only one."""
        stall = find_stall(
            {tail.identity.rank: tail.progress for tail in tails if tail.is_running},
            self._phase_timeouts,
            time.monotonic_ns(),
            time.time(),
        )
        found = set(stall.ranks) if stall is not None else set()
        has_box = {tail.identity.rank for tail in tails if tail.identity.round == expected.round}
        if time.monotonic() - expected.seen_s > self._phase_timeouts.init_s:
            found |= set(expected.ranks) - has_box
        silent, self._suspected = tuple(sorted(found & set(self._suspected))), tuple(found)
        return silent
