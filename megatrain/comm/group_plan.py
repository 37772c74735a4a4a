"""Which groups there are and in which order they are created: a pure function of the layout.

A rank creates its groups one after the other and stays in each until all members are there, so the order decides
whether the ranks wait in a circle. Here there is one order for the whole world, first by name, then by first rank, and
each rank walks its own part of it: of all the groups that are waited for, the first in that order has only members
that are on their way to it. So no barrier is needed (MegaScale sec. 3.5), and no rank takes part in, or knows of, a
group it is no member of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatrain.contracts.layout import Layout, Neighbours, axis_named


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group before it exists. `ranks` are in axis order.

    is_on_host: for what ranks tell each other in host memory beside training. is_link: for sends and receives only.
    """

    name: str
    ranks: tuple[int, ...]
    is_on_host: bool = False
    is_link: bool = False

    @property
    def key(self) -> str:
        """What all members, and they alone, call the group: the ranks of one name are dealt to disjoint groups."""
        return f"{self.name}-{self.ranks[0]}"


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    axis: str
    is_of_ends: bool = False
    """Of the first and the last along the axis; those between them are alone."""
    num_runs: int = 1
    """Of neighbours, in which the ranks along the axis are groups."""
    is_on_host: bool = False
    is_link: bool = False

    def planned(self, layout: Layout, rank: int) -> PlannedGroup:
        ranks = layout.ranks_along(rank, self.axis)
        length = len(ranks) // self.num_runs
        first = layout.index(self.axis, rank) // length * length
        ranks = ranks[first : first + length]
        if self.is_of_ends:
            ends = (ranks[0], ranks[-1])
            ranks = ends if len(ranks) > 1 and rank in ends else (rank,)
        return PlannedGroup(self.name, ranks, self.is_on_host, self.is_link)


_EMBEDDING = _Kind("embedding", "pp", is_of_ends=True)
_LINKS = tuple(_Kind(name, "pp", is_link=True) for name in ("pp-forward", "pp-backward"))
_WRAP_LINKS = tuple(_Kind(f"{link.name}-wrap", link.axis, is_link=True) for link in _LINKS)


def summing_order(layout: Layout) -> tuple[str, ...]:
    """Return the axes along which a number is summed, one after the other, until all ranks have the sum.

    What holds parts of one copy of the model comes first, innermost axis first; the copies follow. The bits of a sum
    depend on this order.
    """
    innermost_first = layout.grid[::-1]
    parts = tuple(axis for axis in innermost_first if axis_named(axis).cuts_model)
    return parts + tuple(axis for axis in innermost_first if axis not in parts)


def planned_groups(
    layout: Layout, rank: int, *, has_wrap_links: bool = False, neighbours: Sequence[Neighbours] = ()
) -> tuple[PlannedGroup, ...]:
    """Return the groups of a rank in the order of their creation, those of one rank among them.

    has_wrap_links: a stage has several chunks, so the last stage sends to the first. neighbours: of the parts that
    several ranks hold, who holds one together.
    """
    return tuple(kind.planned(layout, rank) for kind in _kinds(layout, has_wrap_links, neighbours))


def all_planned_groups(
    layout: Layout, *, has_wrap_links: bool = False, neighbours: Sequence[Neighbours] = ()
) -> Iterator[PlannedGroup]:
    """Yield the groups of the whole world that have several ranks, in the one order of which each rank's is a part."""
    for kind in _kinds(layout, has_wrap_links, neighbours):
        is_in_one = bytearray(layout.world_size)
        for rank in range(layout.world_size):
            if is_in_one[rank]:
                continue
            planned = kind.planned(layout, rank)
            for member in planned.ranks:
                is_in_one[member] = True
            if len(planned.ranks) > 1:
                yield planned


def _kinds(layout: Layout, has_wrap_links: bool, neighbours: Sequence[Neighbours]) -> tuple[_Kind, ...]:
    along = (_Kind(axis, axis) for axis in layout.innermost_first)
    summed = summing_order(layout)
    others = (axis for axis in layout.innermost_first if axis not in summed)
    on_host = (_Kind(f"host-{axis}", axis, is_on_host=True) for axis in (*summed, *others))
    holders = (_Kind(one.name, one.axis, num_runs=one.num_groups) for one in neighbours)
    always = (*along, *on_host, _EMBEDDING, *holders)
    if layout.pp_size == 1:
        return always
    # two stages are each other's neighbour on both sides: there the wrap link would share a pair with the other
    wrap_links = _WRAP_LINKS if has_wrap_links and layout.pp_size == 2 else ()
    return (*always, *_LINKS, *wrap_links)
