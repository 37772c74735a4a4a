"""The host of each rank of a round, in the form that pictures of all ranks use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain_diagnostics.analysis.heat_scale import Ints
from megatrain_diagnostics.events.roster import Roster


@dataclass(frozen=True, slots=True, eq=False)
class Hosts:
    """The hosts of a job in the order of their first ranks. `of_rank`: index in `names`."""

    names: tuple[str, ...]
    of_rank: Ints


def hosts_of(roster: Roster) -> Hosts:
    """Return the hosts. Ranks that never sent anything are on a host without a name."""
    index: dict[str, int] = {}
    of_rank = [index.setdefault(roster.host_of(rank), len(index)) for rank in range(roster.layout.world_size)]
    return Hosts(tuple(index), np.array(of_rank, dtype=np.int64))
