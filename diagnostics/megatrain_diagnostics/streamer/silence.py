"""Which ranks of this host are silent: no box at all, or nothing new in it for longer than their phase may take.

The rule is the executor's (megatrain.fencing.patience); a rank without telemetry is a finding of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatrain.fencing.patience import Patience, find_stall
from megatrain_diagnostics.streamer.expected_ranks import HostRanks
from megatrain_diagnostics.streamer.rank_tail import RankTail


class SilenceWatch:
    """Judges the ranks of the newest round. For one thread."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._suspected: tuple[int, ...] = ()

    def silent(self, tails: Sequence[RankTail], expected: HostRanks) -> tuple[int, ...]:
        """Return the silent ranks by two successive polls: the machine may have paused before one of them."""
        stall = find_stall(
            {tail.identity.rank: tail.progress for tail in tails if tail.is_running},
            self._patience,
            time.monotonic_ns(),
            time.time(),
        )
        found = set(stall.ranks) if stall is not None else set()
        has_box = {tail.identity.rank for tail in tails if tail.identity.round == expected.round}
        if time.monotonic() - expected.seen_s > self._patience.init_s:
            found |= set(expected.ranks) - has_box
        silent, self._suspected = tuple(sorted(found & set(self._suspected))), tuple(found)
        return silent
