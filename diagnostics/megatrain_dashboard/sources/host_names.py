"""The host of each rank of an incident, from etcd and events."""

from __future__ import annotations

from collections.abc import Callable

from megatrain.contracts.errors import DataError
from megatrain.contracts.records.incident import Incident
from megatrain_dashboard.sources.protocol import JobSource
from megatrain_diagnostics.store.host_queries import hosts_of_ranks

HostOf = Callable[[int, int], str]
"""(round, rank) -> host; "" where that is not known."""


def host_names(source: JobSource, incidents: tuple[Incident, ...]) -> HostOf:
    """Return a function that gives the hosts of ranks that ended in the incidents, or that the incidents blame."""
    places = {(one.round, failure.rank) for one in incidents for failure in one.failures}
    places |= {(one.round, rank) for one in incidents for rank in one.culprit_ranks}
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
