"""Which groups there are and in which order they are created: a pure function of the layout.

A rank creates its groups one after the other and stays in each until all members are there, so the order decides
whether the ranks wait in a circle. Here there is one order for the whole world, first by name, then by first rank, and
each rank walks its own part of it: of all the groups that are waited for, the first in that order has only members
that are on their way to it. So no barrier is needed (MegaScale sec. 3.5), and no rank takes part in, or knows of, a
group it is no member of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatrain.contracts.layout import Layout


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
    ranks_of: Callable[[Layout, int], tuple[int, ...]]
    is_on_host: bool = False
    is_link: bool = False

    def planned(self, layout: Layout, rank: int) -> PlannedGroup:
        return PlannedGroup(self.name, self.ranks_of(layout, rank), self.is_on_host, self.is_link)


def _end_ranks(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the first and last stage of this rank's pipeline; for a stage between them, itself."""
    pp_ranks = layout.pp_ranks(rank)
    ends = (pp_ranks[0], pp_ranks[-1])
    return ends if layout.pp_size > 1 and rank in ends else (rank,)


_ALWAYS = (
    _Kind("tp", Layout.tp_ranks),
    _Kind("dp", Layout.dp_ranks),
    _Kind("pp", Layout.pp_ranks),
    _Kind("host-tp", Layout.tp_ranks, is_on_host=True),
    _Kind("host-pp", Layout.pp_ranks, is_on_host=True),
    _Kind("host-dp", Layout.dp_ranks, is_on_host=True),
    _Kind("embedding", _end_ranks),
)
_LINKS = (_Kind("pp-forward", Layout.pp_ranks, is_link=True), _Kind("pp-backward", Layout.pp_ranks, is_link=True))
_WRAP_LINKS = (
    _Kind("pp-forward-wrap", Layout.pp_ranks, is_link=True),
    _Kind("pp-backward-wrap", Layout.pp_ranks, is_link=True),
)


def planned_groups(layout: Layout, rank: int, *, has_wrap_links: bool = False) -> tuple[PlannedGroup, ...]:
    """Return the groups of a rank in the order of their creation, those of one rank among them.

    has_wrap_links: a stage has several chunks, so the last stage sends to the first.
    """
    return tuple(kind.planned(layout, rank) for kind in _kinds(layout, has_wrap_links))


def all_planned_groups(layout: Layout, *, has_wrap_links: bool = False) -> Iterator[PlannedGroup]:
    """Yield the groups of the whole world that have several ranks, in the one order of which each rank's is a part."""
    for kind in _kinds(layout, has_wrap_links):
        is_in_one = bytearray(layout.world_size)
        for rank in range(layout.world_size):
            if is_in_one[rank]:
                continue
            planned = kind.planned(layout, rank)
            for member in planned.ranks:
                is_in_one[member] = True
            if len(planned.ranks) > 1:
                yield planned


def _kinds(layout: Layout, has_wrap_links: bool) -> tuple[_Kind, ...]:
    if layout.pp_size == 1:
        return _ALWAYS
    # two stages are each other's neighbour on both sides: there the wrap link would share a pair with the other
    wrap_links = _WRAP_LINKS if has_wrap_links and layout.pp_size == 2 else ()
    return (*_ALWAYS, *_LINKS, *wrap_links)
