"""Which groups exist and in which order ranks create them: a pure function of the layout.

A rank creates its groups one after the other and waits in each until all members have arrived, so a bad order can
deadlock. Here all groups have one order, first by name, then by first rank, and each rank creates its own groups in
that order. This cannot deadlock. Consider the first group, in this order, in which a rank waits. A member that has not
arrived does not wait in an earlier group, because this group is the first, and not in a later group, because it creates
this group before. So all members arrive, and the group is completed. Therefore no barrier is needed (MegaScale sec.
3.5), and ranks that are not members take no part in the creation of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatrain.contracts.layout import NEAREST, STAGES, Holders, Layout, axis_named


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group that is not created yet. `ranks` are in axis order.

    axis: the axis along which the ranks lie, or the outermost of several. is_of_replicas: replicas exchange
    gradients and parameters in it, which are large and needed later. uses_cpu_memory: for exchanges in the memory of
    the CPU, in parallel with training. is_link: for sends and receives only.
    """

    name: str
    ranks: tuple[int, ...]
    axis: str = ""
    is_of_replicas: bool = False
    uses_cpu_memory: bool = False
    is_link: bool = False

    @property
    def key(self) -> str:
        """The name that only the members of this group use: groups of the same name have no rank in common."""
        return f"{self.name}-{self.ranks[0]}"

    def is_awaited_later(self, *, has_sequence_chunks: bool) -> bool:
        """Return whether callers start exchanges of the group first and wait for them later.

        has_sequence_chunks: tp ranks exchange sequence chunks.
        """
        return self.is_link or self.is_of_replicas or (has_sequence_chunks and self.name == NEAREST)


@dataclass(frozen=True, slots=True)
class _GroupPattern:
    """Which ranks along which axes form the groups of one name."""

    name: str
    axes: tuple[str, ...]
    joins_ends: bool = False
    """The group joins the first and the last rank along the axis; each rank between them is a group of one."""
    num_runs: int = 1
    """The ranks along the axes are cut into this many runs of consecutive ranks; each run is a group."""
    is_of_replicas: bool = False
    uses_cpu_memory: bool = False
    is_link: bool = False

    def planned(self, layout: Layout, rank: int) -> PlannedGroup:
        ranks = layout.ranks_along(rank, *self.axes)
        length = len(ranks) // self.num_runs
        first = ranks.index(rank) // length * length
        ranks = ranks[first : first + length]
        if self.joins_ends:
            ends = (ranks[0], ranks[-1])
            ranks = ends if len(ranks) > 1 and rank in ends else (rank,)
        return PlannedGroup(self.name, ranks, self.axes[0], self.is_of_replicas, self.uses_cpu_memory, self.is_link)


_EMBEDDING = _GroupPattern("embedding", (STAGES,), joins_ends=True)
_LINKS = tuple(_GroupPattern(name, (STAGES,), is_link=True) for name in ("pp-forward", "pp-backward"))
_WRAP_LINKS = tuple(_GroupPattern(f"{link.name}-wrap", link.axes, is_link=True) for link in _LINKS)


def summing_order(layout: Layout) -> tuple[str, ...]:
    """Return the axes along which a number is summed, one after the other, until all ranks have the sum.

    The axes that shard a copy of the model come first, innermost axis first; the axes of the copies follow. The bits of
    a sum depend on this order.
    """
    innermost_first = layout.grid[::-1]
    parts = tuple(axis for axis in innermost_first if axis_named(axis).cuts_model)
    return parts + tuple(axis for axis in innermost_first if axis not in parts)


def planned_groups(
    layout: Layout, rank: int, *, has_wrap_links: bool = False, holders: Sequence[Holders] = ()
) -> tuple[PlannedGroup, ...]:
    """Return the groups of a rank in the order of their creation, including the groups of one rank.

    has_wrap_links: a stage has several chunks, so the last stage sends to the first. holders: the axes along which
    several ranks hold the same part, with the number of parts.
    """
    return tuple(pattern.planned(layout, rank) for pattern in _patterns(layout, has_wrap_links, holders))


def all_planned_groups(
    layout: Layout, *, has_wrap_links: bool = False, holders: Sequence[Holders] = ()
) -> Iterator[PlannedGroup]:
    """Yield the groups of all ranks of `layout` that have several ranks, in the order of creation."""
    for pattern in _patterns(layout, has_wrap_links, holders):
        is_in_one = bytearray(layout.world_size)
        for rank in range(layout.world_size):
            if is_in_one[rank]:
                continue
            planned = pattern.planned(layout, rank)
            for member in planned.ranks:
                is_in_one[member] = True
            if len(planned.ranks) > 1:
                yield planned


def _patterns(layout: Layout, has_wrap_links: bool, holders: Sequence[Holders]) -> tuple[_GroupPattern, ...]:
    along = (
        _GroupPattern(layout.group_name(axes), axes, is_of_replicas=layout.is_replica_group(axes))
        for axes in [*((axis,) for axis in layout.innermost_first), *layout.replica_spans]
    )
    summed = summing_order(layout)
    others = (axis for axis in layout.innermost_first if axis not in summed)
    on_cpus = (
        _GroupPattern(f"host-{layout.group_name(axes)}", axes, uses_cpu_memory=True)
        for axes in [*((axis,) for axis in (*summed, *others)), *layout.replica_spans]
    )
    of_holders = (_GroupPattern(holder.name, (holder.axis,), num_runs=holder.num_groups) for holder in holders)
    always = (*along, *on_cpus, _EMBEDDING, *of_holders)
    if layout.pp_size == 1:
        return always
    # with two stages the wrap link joins the same pair of ranks as the neighbor link, so it needs its own group
    wrap_links = _WRAP_LINKS if has_wrap_links and layout.pp_size == 2 else ()
    return (*always, *_LINKS, *wrap_links)
