"""Who the ranks of one incarnation are: host, coordinates, groups, as the analyses ask for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import Coordinate, Layout
from megatrain_diagnostics.events.tables import Groups, Int32, Ranks

MOST_RANKS = 2**20
"""Of a layout that is believed: who looks makes a table of all ranks, also of those that nobody heard of."""


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """A process group: what tells it apart is its name and its members."""

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
    """The ranks of one incarnation. `hosts` has no entry for a rank that was never heard of."""

    incarnation: int
    layout: Layout
    hosts: Mapping[int, str]
    groups: Mapping[tuple[int, int], GroupMembers]
    """By rank, and number of the group in that rank's table."""
    branch: str = ""

    @cached_property
    def stage_of(self) -> Int32:
        """Return the stage of each rank of the layout."""
        return np.array([self.coordinate(rank).pp for rank in range(self.layout.world_size)], dtype=np.int32)

    def coordinate(self, rank: int) -> Coordinate:
        return self.layout.coordinate(rank)

    def host_of(self, rank: int) -> str:
        """Return the host of a rank, "" where it was never heard of."""
        return self.hosts.get(rank, "")

    def ranks_on(self, host: str) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, name in self.hosts.items() if name == host))


def newest_incarnation(ranks: Ranks) -> int:
    """Return the number of the newest incarnation of which at least half of the ranks told. Raises: DataError.

    A single rank that made a number up is not the job; where no incarnation has that many, the newest of all counts.
    """
    if not len(ranks.incarnation):
        raise DataError("no rank was ever heard of: the directory holds no table of ranks; is it a job's events?")
    numbers = sorted(set(ranks.incarnation.tolist()), reverse=True)
    return next((number for number in numbers if _has_half(ranks, number)), int(numbers[0]))


def _has_half(ranks: Ranks, incarnation: int) -> bool:
    rows = ranks.incarnation == incarnation
    sizes = ranks.tp_size[rows].astype(np.int64) * ranks.pp_size[rows] * ranks.dp_size[rows]
    return bool(2 * len(np.unique(ranks.rank[rows])) >= np.median(sizes))


def make_roster(ranks: Ranks, groups: Groups, incarnation: int) -> Roster:
    """Return the ranks of one incarnation; of a rank that is told of twice the newest row counts.

    The layout is what more than half of the ranks say; those that say another one, or are none of it, are left out.
    Raises: DataError for an incarnation that nothing is known of, and for ranks without such a majority.
    """
    rows = np.flatnonzero(ranks.incarnation == incarnation)
    if not len(rows):
        raise DataError(f"incarnation {incarnation} has no ranks; there are {sorted(set(ranks.incarnation.tolist()))}")
    rows = rows[np.argsort(ranks.at_ns[rows], kind="stable")]
    said = {int(ranks.rank[row]): (int(ranks.tp_size[row]), int(ranks.pp_size[row]), int(ranks.dp_size[row]))
            for row in rows}  # fmt: skip
    (sizes, count), *_ = Counter(said.values()).most_common(1)
    if 2 * count <= len(said) or min(sizes) < 1:
        raise DataError(
            f"incarnation {incarnation}: ranks tell of different layouts (tp, pp, dp): {sorted(set(said.values()))}"
        )
    tp_size, pp_size, dp_size = sizes
    if tp_size * pp_size * dp_size > MOST_RANKS:
        raise DataError(
            f"incarnation {incarnation}: ranks tell of a layout (tp, pp, dp)={sizes}, more than {MOST_RANKS:,} ranks; "
            "no job is as large, and these events are nonsense"
        )
    layout = Layout(tp_size=tp_size, pp_size=pp_size, dp_size=dp_size)
    rows = np.array([row for row in rows if said[int(ranks.rank[row])] == sizes
                     and 0 <= ranks.rank[row] < layout.world_size])  # fmt: skip
    members = {
        (int(groups.rank[row]), int(groups.group[row])): GroupMembers(
            str(groups.name[row]), int(groups.first_rank[row]), int(groups.stride[row]), int(groups.num_ranks[row])
        )
        for row in np.flatnonzero(groups.incarnation == incarnation)
    }
    return Roster(
        incarnation=incarnation,
        layout=layout,
        hosts={int(ranks.rank[row]): str(ranks.host[row]) for row in rows},
        groups=members,
        branch=str(ranks.branch[rows[-1]]),
    )
