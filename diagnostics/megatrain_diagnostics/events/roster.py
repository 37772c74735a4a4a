"""The ranks of one round, for the analyses: their hosts, coordinates and process groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from megatrain.contracts.errors import DataError, TopologyError
from megatrain.contracts.layout import NUMBERING_AXES, REPLICAS, SIZED_AXES, STAGES, Coordinate, Layout
from megatrain_diagnostics.events.source import EventSource, Where
from megatrain_diagnostics.events.tables import Float64, Groups, Int64, Ranks

MAX_RANKS = 2**20
"""Largest accepted world size: readers allocate tables of all ranks, including those that have sent nothing."""


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """A process group, identified by its name and its members."""

    name: str
    first_rank: int
    stride: int
    num_ranks: int

    @property
    def ranks(self) -> range:
        """Return the members in the order of the group; empty if the writer did not know them (stride 0)."""
        if self.stride == 0:
            return range(0)
        return range(self.first_rank, self.first_rank + self.num_ranks * self.stride, self.stride)


@dataclass(frozen=True)
class Roster:
    """The ranks of one round. `hosts` has no entry for a rank that has sent nothing."""

    round: int
    layout: Layout
    hosts: Mapping[int, str]
    groups: Mapping[tuple[int, int], GroupMembers]
    """(rank, number of the group in that rank's table) -> members."""
    branch: str = ""

    @cached_property
    def stage_of(self) -> Int64:
        """Return the stage of each rank of the layout."""
        return places_along(self.layout, STAGES)

    def coordinate(self, rank: int) -> Coordinate:
        return self.layout.coordinate(rank)

    def host_of(self, rank: int) -> str:
        """Return the host of a rank; "" if it has sent nothing."""
        return self.hosts.get(rank, "")

    def hosts_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the known hosts of ranks, each once, in the order of the ranks."""
        return tuple(dict.fromkeys(filter(None, map(self.host_of, ranks))))

    def ranks_on(self, host: str) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, name in self.hosts.items() if name == host))


def places_along(layout: Layout, axis: str) -> Int64:
    """Return the place of each rank along an axis. Shape: [ranks]."""
    ranks = np.arange(layout.world_size, dtype=np.int64)
    return ranks // layout.stride(axis) % layout.size(axis)


def groups_along(layout: Layout, *axes: str) -> Int64:
    """Return the ranks of the groups along these axes in each stage. Shape: [stages, groups of a stage, members]."""
    ranks = np.arange(layout.world_size, dtype=np.int64).reshape([layout.size(axis) for axis in layout.grid])
    last = np.moveaxis(ranks, [layout.grid.index(axis) for axis in axes], range(-len(axes), 0))
    return last.reshape(layout.pp_size, -1, prod(map(layout.size, axes)))


def replica_groups(layout: Layout) -> Int64:
    """Return the ranks that exchange parameters and gradients. Shape: [stages, groups of a stage, members]."""
    return groups_along(layout, *layout.replica_axes(REPLICAS[0]))


def axis_values(layout: Layout, rank: int) -> dict[str, int]:
    """Return the values of the axis columns in the row of a rank in the table of ranks."""
    places = {axis.rank_name: layout.index(axis.name, rank) for axis in SIZED_AXES}
    return {**places, **{axis.size_name: layout.size(axis.name) for axis in SIZED_AXES}}


def world_sizes(ranks: Ranks) -> Float64:
    """Return the world size of each row's layout; as floats, because invalid sizes could overflow integers."""
    sizes: Float64 = np.prod([getattr(ranks, axis.size_name) for axis in NUMBERING_AXES], axis=0, dtype=np.float64)
    return sizes


def newest_round(ranks: Ranks) -> int:
    """Return the newest round that at least half of its ranks reported. Raises: DataError.

    A single rank with a wrong round number therefore has no effect. If no round is reported by half of its ranks, the
    newest reported round is returned.
    """
    if not len(ranks.round):
        raise DataError(
            "no rank has sent anything: the directory contains no table of ranks; are these the events of a job?"
        )
    numbers = sorted(set(ranks.round.tolist()), reverse=True)
    return next((number for number in numbers if _has_half(ranks, number)), int(numbers[0]))


def _has_half(ranks: Ranks, round_number: int) -> bool:
    rows = ranks.round == round_number
    return bool(2 * len(np.unique(ranks.rank[rows])) >= np.median(world_sizes(ranks)[rows]))


def read_roster(source: EventSource, round_number: int) -> Roster:
    """Read the ranks of one round. Raises: DataError as `make_roster`, and the errors of the source."""
    where = Where(rounds=(round_number,))
    return make_roster(source.read(Ranks, where), source.read(Groups, where), round_number)


def make_roster(ranks: Ranks, groups: Groups, round_number: int) -> Roster:
    """Return the ranks of one round; if a rank has several rows, the newest one is used.

    The layout is the one that more than half of the ranks report; ranks with another layout, or outside the layout,
    are left out. Raises: DataError for a round without rows, and if no layout has such a majority.
    """
    rows = np.flatnonzero(ranks.round == round_number)
    if not len(rows):
        raise DataError(
            f"round {round_number} has no ranks; the rounds with ranks are {sorted(set(ranks.round.tolist()))}"
        )
    rows = rows[np.argsort(ranks.at_ns[rows], kind="stable")]
    names = [axis.size_name for axis in SIZED_AXES]
    sizes_of_row = np.stack([getattr(ranks, name) for name in names], axis=1)
    sizes_by_rank = {int(ranks.rank[row]): tuple(sizes_of_row[row].tolist()) for row in rows}
    (sizes, count), *_ = Counter(sizes_by_rank.values()).most_common(1)
    if 2 * count <= len(sizes_by_rank):
        found = sorted(set(sizes_by_rank.values()))
        raise DataError(f"round {round_number}: ranks report different layouts ({', '.join(names)}): {found}")
    try:
        layout = Layout(**dict(zip(names, sizes, strict=True)))
    except TopologyError as error:
        raise DataError(f"round {round_number}: ranks report an impossible layout: {error}") from error
    if layout.world_size > MAX_RANKS:
        raise DataError(
            f"round {round_number}: ranks report the layout {layout}, more than {MAX_RANKS:,} ranks; "
            "no job is that large, so these events are invalid"
        )
    rows = np.array([row for row in rows if sizes_by_rank[int(ranks.rank[row])] == sizes
                     and 0 <= ranks.rank[row] < layout.world_size])  # fmt: skip
    members = {
        (int(groups.rank[row]), int(groups.group[row])): GroupMembers(
            str(groups.name[row]), int(groups.first_rank[row]), int(groups.stride[row]), int(groups.num_ranks[row])
        )
        for row in np.flatnonzero(groups.round == round_number)
    }
    return Roster(
        round=round_number,
        layout=layout,
        hosts={int(ranks.rank[row]): str(ranks.host[row]) for row in rows},
        groups=members,
        branch=str(ranks.branch[rows[-1]]),
    )
