"""Who the ranks of one round are: host, coordinates, groups, as the analyses ask for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatrain.contracts.errors import DataError, TopologyError
from megatrain.contracts.layout import SIZED_AXES, Coordinate, Layout
from megatrain_diagnostics.events.tables import Groups, Int64, Ranks, axis_column, world_sizes

MOST_RANKS = 2**20
"""Largest accepted layout: a reader makes a table of all its ranks, also of those that sent nothing."""


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """A process group, identified by its name and its members."""

    name: str
    first_rank: int
    stride: int
    num_ranks: int

    @property
    def ranks(self) -> range:
        """Return the members in the group's order; none where the writer could not say them."""
        if self.stride == 0:
            return range(0)
        return range(self.first_rank, self.first_rank + self.num_ranks * self.stride, self.stride)


@dataclass(frozen=True)
class Roster:
    """The ranks of one round. `hosts` has no entry for a rank that never sent anything."""

    round: int
    layout: Layout
    hosts: Mapping[int, str]
    groups: Mapping[tuple[int, int], GroupMembers]
    """By rank, and number of the group in that rank's table."""
    branch: str = ""

    @cached_property
    def stage_of(self) -> Int64:
        """Return the stage of each rank of the layout."""
        return places_along(self.layout, "pp")

    def coordinate(self, rank: int) -> Coordinate:
        return self.layout.coordinate(rank)

    def host_of(self, rank: int) -> str:
        """Return the host of a rank, "" where it never sent anything."""
        return self.hosts.get(rank, "")

    def ranks_on(self, host: str) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, name in self.hosts.items() if name == host))


def places_along(layout: Layout, axis: str) -> Int64:
    """Return the place of each rank along an axis. Shape: [ranks]."""
    ranks = np.arange(layout.world_size, dtype=np.int64)
    return ranks // layout.stride(axis) % layout.size(axis)


def groups_along(layout: Layout, axis: str) -> Int64:
    """Return the ranks of each group along an axis inside stages. Shape: [stages, groups of a stage, members]."""
    ranks = np.arange(layout.world_size, dtype=np.int64).reshape([layout.size(one) for one in layout.grid])
    last = np.moveaxis(ranks, layout.grid.index(axis), -1)
    return last.reshape(layout.pp_size, -1, layout.size(axis))


def newest_round(ranks: Ranks) -> int:
    """Return the number of the newest round that at least half of its ranks reported. Raises: DataError.

    A single rank that made a number up is not the job; where no round has that many, the newest of all counts.
    """
    if not len(ranks.round):
        raise DataError("no rank has sent anything: the directory holds no table of ranks; is it a job's events?")
    numbers = sorted(set(ranks.round.tolist()), reverse=True)
    return next((number for number in numbers if _has_half(ranks, number)), int(numbers[0]))


def _has_half(ranks: Ranks, round_number: int) -> bool:
    rows = ranks.round == round_number
    return bool(2 * len(np.unique(ranks.rank[rows])) >= np.median(world_sizes(ranks)[rows]))


def make_roster(ranks: Ranks, groups: Groups, round_number: int) -> Roster:
    """Return the ranks of one round; of a rank with several rows the newest counts.

    The layout is what more than half of the ranks say; those that say another one, or are none of it, are left out.
    Raises: DataError for a round that nothing is known of, and for ranks without such a majority.
    """
    rows = np.flatnonzero(ranks.round == round_number)
    if not len(rows):
        raise DataError(f"round {round_number} has no ranks; there are {sorted(set(ranks.round.tolist()))}")
    rows = rows[np.argsort(ranks.at_ns[rows], kind="stable")]
    names = [axis.size_name for axis in SIZED_AXES]
    told = np.stack([axis_column(ranks, name) for name in names], axis=1)
    said = {int(ranks.rank[row]): tuple(told[row].tolist()) for row in rows}
    (sizes, count), *_ = Counter(said.values()).most_common(1)
    if 2 * count <= len(said):
        raise DataError(
            f"round {round_number}: ranks tell of different layouts ({', '.join(names)}): {sorted(set(said.values()))}"
        )
    try:
        layout = Layout(**dict(zip(names, sizes, strict=True)))
    except TopologyError as error:
        raise DataError(f"round {round_number}: ranks tell of a layout that there cannot be: {error}") from error
    if layout.world_size > MOST_RANKS:
        raise DataError(
            f"round {round_number}: ranks tell of a layout {layout}, more than {MOST_RANKS:,} ranks; "
            "no job is as large, and these events are nonsense"
        )
    rows = np.array([row for row in rows if said[int(ranks.rank[row])] == sizes
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
