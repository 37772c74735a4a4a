"""Finds the hosts of all ranks of a round, for pictures, and those of ranks in incidents, from etcd and events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatrain.contracts.errors import DataError
from megatrain.contracts.records.incident import Incident
from megatrain_dashboard.sources.protocol import JobSource
from megatrain_diagnostics.analysis.heat_scale import Ints
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.store.rounds_and_hosts import hosts_of_ranks

HostOf = Callable[[int, int], str]
"""(round, rank) -> host; "" where that is not known."""


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


def roster_if_known(source: JobSource, round_number: int) -> Roster | None:
    """Return the roster of a round; None where nothing is known of the round."""
    try:
        return source.roster(round_number)
    except DataError:
        return None


def host_names(source: JobSource, incidents: tuple[Incident, ...]) -> HostOf:
    """Return a function that gives the hosts of ranks that ended in the incidents, or that the incidents blame."""
    places = {(incident.round, failure.rank) for incident in incidents for failure in incident.failures}
    places |= {(incident.round, rank) for incident in incidents for rank in incident.culprit_ranks}
    try:
        known = hosts_of_ranks(source.events, places)
    except DataError:
        known = {}
    snapshot = source.snapshot()
    rounds = {} if snapshot is None else snapshot.rounds

    def host_of(number: int, rank: int) -> str:
        if number in rounds:
            try:
                return rounds[number].host_of(rank).host
            except LookupError:
                return ""
        return known.get((number, rank), "")

    return host_of
