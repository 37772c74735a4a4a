"""Finds groups, links and hosts that are slower than others of their kind, and single exchanges that took much longer.

Exchanges of equal kind, operation and size are compared. A group or link is slow if its median transfer time is more
than 10 % above the median over the groups of its kind (Greyhound); a kind needs at least three groups. A host is
suspected if at least half of its groups and links are slow, and no host has a larger fraction of slow ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatrain.contracts.black_box.operations import operation_name
from megatrain_diagnostics.analysis.exchanges import Exchanges
from megatrain_diagnostics.events.roster import GroupMembers, Roster
from megatrain_diagnostics.events.tables import Float64, Int64, Spans

SLOW_EXCESS = 0.1
_MIN_GROUPS = 3
"""A kind of exchange needs at least this many groups for a comparison."""
_MIN_EXCHANGES = 3
_MAX_SLOW = 20
_MAX_HOT = 10
_MAX_UNEQUAL = 10
_UNEQUAL_BYTES = 0.1
"""A load is unequal if it exceeds the mean of its group by more than this fraction."""


@dataclass(frozen=True, slots=True)
class SlowGroup:
    """A group, or a link of two ranks, with longer transfers than others of its kind."""

    group: str
    operation: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    count: int
    transfer_s: float
    expected_s: float
    """The median over the groups of its kind."""

    @property
    def excess(self) -> float:
        """Return how much longer the transfers take; 0.1 is 10 %."""
        return self.transfer_s / self.expected_s - 1.0


@dataclass(frozen=True, slots=True)
class SlowHost:
    """A host with slow groups and links. `excess` is the mean over the slow ones."""

    host: str
    num_slow: int
    num_groups: int
    excess: float


@dataclass(frozen=True, slots=True)
class HotSpot:
    """One exchange that took much longer than others of its kind."""

    step: int
    group: str
    operation: str
    ranks: tuple[int, ...]
    num_bytes: int
    transfer_s: float
    expected_s: float


@dataclass(frozen=True, slots=True)
class UnequalLoad:
    """A member that sends or receives more than the others of its group, for instance because of a hot expert."""

    rank: int
    group: str
    operation: str
    num_bytes: int
    mean_bytes: int


@dataclass(frozen=True, slots=True)
class SlowLinks:
    """Slow groups and hosts, hot spots, and unequal loads."""

    groups: tuple[SlowGroup, ...]
    hosts: tuple[SlowHost, ...]
    hot_spots: tuple[HotSpot, ...]
    unequal: tuple[UnequalLoad, ...]
    num_compared: int
    """Number of groups and links that were compared. A kind with too few of them is not compared."""


def find_slow_links(
    spans: Spans, exchanges: Exchanges, chosen: Int64, transfer_s: Float64, classes: Int64, roster: Roster
) -> SlowLinks:
    """Return the slow ones of the chosen exchanges.

    `chosen`: indices of exchanges. `classes`: a number for each of them, equal for exchanges of equal kind, operation
    and size. Shapes: chosen, transfer_s and classes [chosen exchanges].
    """
    slow: list[SlowGroup] = []
    compared: list[GroupMembers] = []
    hot: list[HotSpot] = []
    for number in np.unique(classes).tolist():
        own = np.flatnonzero(classes == number)
        median = float(np.median(transfer_s[own]))
        hot += _hot_spots(exchanges, chosen[own], transfer_s[own], median, spans)
        by_group = _medians(exchanges.group_of[chosen[own]], transfer_s[own])
        if len(by_group) < _MIN_GROUPS:
            continue
        expected = float(np.median([seconds for seconds, _ in by_group.values()]))
        for group, (seconds, count) in by_group.items():
            members = exchanges.groups[group]
            compared.append(members)
            if seconds > expected * (1.0 + SLOW_EXCESS):
                operation = operation_name(int(exchanges.operation[chosen[own[0]]]))
                hosts = roster.hosts_of(members.ranks)
                slow.append(SlowGroup(members.name, operation, tuple(members.ranks), hosts, count, seconds, expected))
    slow.sort(key=lambda slow_group: -slow_group.excess)
    return SlowLinks(
        groups=tuple(slow[:_MAX_SLOW]),
        hosts=tuple(_slow_hosts(slow, compared, roster)),
        hot_spots=tuple(sorted(hot, key=lambda hot_spot: hot_spot.expected_s - hot_spot.transfer_s)[:_MAX_HOT]),
        unequal=tuple(_unequal_loads(spans, exchanges, chosen)),
        num_compared=len(compared),
    )


def _medians(group_of: Int64, transfer_s: Float64) -> dict[int, tuple[float, int]]:
    """Return the median transfer time and the number of exchanges of each group that has enough exchanges."""
    order = np.argsort(group_of, kind="stable")
    groups, first = np.unique(group_of[order], return_index=True)
    parts = np.split(transfer_s[order], first[1:])
    return {
        int(group): (float(np.median(part)), len(part))
        for group, part in zip(groups, parts, strict=True)
        if len(part) >= _MIN_EXCHANGES
    }


def _hot_spots(
    exchanges: Exchanges, chosen: Int64, transfer_s: Float64, median: float, spans: Spans
) -> Sequence[HotSpot]:
    """Return the outliers: more than twice the median, and more than ten spreads above it."""
    spread = float(np.median(np.abs(transfer_s - median)))
    limit = median + max(median, 10.0 * spread)
    outliers = np.flatnonzero(transfer_s > limit)
    worst = outliers[np.argsort(-transfer_s[outliers])][:_MAX_HOT]
    found = []
    for index in worst.tolist():
        number = int(chosen[index])
        members = exchanges.groups[int(exchanges.group_of[number])]
        found.append(
            HotSpot(
                step=int(exchanges.step[number]),
                group=members.name,
                operation=operation_name(int(exchanges.operation[number])),
                ranks=tuple(members.ranks),
                num_bytes=int(spans.num_bytes[exchanges.parts[exchanges.first[number]]]),
                transfer_s=float(transfer_s[index]),
                expected_s=median,
            )
        )
    return found


def _slow_hosts(slow: Sequence[SlowGroup], compared: Sequence[GroupMembers], roster: Roster) -> Sequence[SlowHost]:
    num_groups: dict[str, int] = {}
    for members in compared:
        for host in roster.hosts_of(members.ranks):
            num_groups[host] = num_groups.get(host, 0) + 1
    excesses: dict[str, list[float]] = {}
    for slow_group in slow:
        for host in slow_group.hosts:
            excesses.setdefault(host, []).append(slow_group.excess)
    shares = {host: len(found) / num_groups[host] for host, found in excesses.items()}
    # a slow host makes links to other hosts slow too, so the host with the largest fraction of slow links is suspected
    worst = max(shares.values(), default=0.0)
    found = [
        SlowHost(host, len(its), num_groups[host], float(np.mean(its)))
        for host, its in excesses.items()
        if shares[host] >= max(0.5, worst)
    ]
    return sorted(found, key=lambda slow_host: -slow_host.excess)


def _unequal_loads(spans: Spans, exchanges: Exchanges, chosen: Int64) -> Sequence[UnequalLoad]:
    is_chosen = np.zeros(len(exchanges), dtype=bool)
    is_chosen[chosen] = True
    is_chosen &= exchanges.num_members > 2  # both ends of a link have the same load
    rows = exchanges.parts[np.repeat(is_chosen, exchanges.num_parts)]
    if not len(rows):
        return []
    exchange = exchanges.exchange_of[rows]
    keys = np.stack([exchanges.group_of[exchange], exchanges.operation[exchange], spans.rank[rows]], axis=1)
    members, of_row = np.unique(keys, axis=0, return_inverse=True)
    loads = np.bincount(of_row.reshape(-1), weights=spans.num_bytes[rows], minlength=len(members))
    _, of_member = np.unique(members[:, :2], axis=0, return_inverse=True)
    of_member = of_member.reshape(-1)
    means = (np.bincount(of_member, weights=loads) / np.bincount(of_member))[of_member]
    found = []
    for index in np.flatnonzero(loads > means * (1.0 + _UNEQUAL_BYTES)).tolist():
        group_index, operation, rank = members[index].tolist()
        name = exchanges.groups[group_index].name
        found.append(UnequalLoad(rank, name, operation_name(operation), int(loads[index]), int(means[index])))
    return sorted(found, key=lambda load: load.mean_bytes - load.num_bytes)[:_MAX_UNEQUAL]
