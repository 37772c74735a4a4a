"""Which rank keeps a copy of which snapshot, and which snapshots in memory a job can resume from. Pure functions.

A suspected host may be evicted together with all hosts of a group of ranks. So a copy is useful only on a host that
holds no rank of the owner's groups along any axis. Source: ByteRobust (SOSP'25, arXiv:2509.16293).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from megatrain.arena.slot_layout import SealedSnapshot
from megatrain.contracts.errors import TopologyError
from megatrain.contracts.layout import NEAREST, Layout, axis_named
from megatrain.formatting import count_text


def choose_keepers(layout: Layout, host_of: Sequence[str]) -> tuple[int, ...]:
    """Return, for each rank, the rank that keeps a copy of its snapshot. Every rank keeps copies of exactly one rank.

    host_of: the host of each rank. A copy is never on a host of the owner's group along any axis.
    Raises: TopologyError when no shift of the mesh achieves that.
    """
    forbidden = [
        {host_of[member] for axis in layout.axes for member in layout.ranks_along(rank, axis)}
        for rank in range(layout.world_size)
    ]
    for shifts in _shifts(layout):
        keepers = tuple(_shifted(layout, rank, shifts) for rank in range(layout.world_size))
        if all(host_of[keeper] not in hosts for keeper, hosts in zip(keepers, forbidden, strict=True)):
            return keepers
    raise TopologyError(
        f"checkpoint.has_peer_copies=true: {layout} on {count_text(len(set(host_of)), 'host')} leaves no host "
        f"outside a rank's own groups along {', '.join(layout.axes)}; use more hosts, with pp_size and dp_size "
        "above 1, or set checkpoint.has_peer_copies=false"
    )


def _shifts(layout: Layout) -> Iterator[dict[str, int]]:
    """Yield shifts of a rank's coordinates along two or more axes, farthest first, because near ranks share hosts.

    A shift along only one axis would stay in the group along that axis. Ranks along the innermost axis are close, so no
    shift along that axis is tried.
    """
    axes = sorted((axis for axis in layout.grid if axis != NEAREST), key=lambda axis: axis_named(axis).cuts_model)
    for shifts in product(*(_far_first(layout.size(axis)) for axis in axes)):
        if sum(shift > 0 for shift in shifts) > 1:
            yield dict(zip(axes, shifts, strict=True))


def _far_first(size: int) -> list[int]:
    return sorted(range(size), key=lambda shift: (-min(shift, size - shift), shift))


def _shifted(layout: Layout, rank: int, shifts: Mapping[str, int]) -> int:
    at = layout.coordinate(rank)
    return layout.rank_of({axis: (at[axis] + shifts.get(axis, 0)) % layout.size(axis) for axis in layout.grid})


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A snapshot that all ranks can restore without storage. `holder_of[rank]`: a rank on a host with `rank`'s part."""

    snapshot: SealedSnapshot
    holder_of: tuple[int, ...]


def newest_in_memory(
    held: Sequence[Mapping[int, Sequence[SealedSnapshot]]], host_of: Sequence[str]
) -> MemoryPoint | None:
    """Return the newest snapshot of which every rank's part is in some host's arena, None without one.

    held: for each rank, the sealed snapshots in its host's arena, as owner rank -> snapshots. A rank's own host is
    preferred as the holder, so that nothing is sent unnecessarily.
    """
    world_size = len(host_of)
    holders: dict[SealedSnapshot, dict[int, int]] = {}
    """snapshot -> owner -> holder."""
    for holder in reversed(range(world_size)):
        for owner, snapshots in held[holder].items():
            for snapshot in snapshots:
                by_owner = holders.setdefault(snapshot, {})
                if owner < world_size and (owner not in by_owner or host_of[by_owner[owner]] != host_of[owner]):
                    by_owner[owner] = holder
    complete = [snapshot for snapshot, by_owner in holders.items() if len(by_owner) == world_size]
    if not complete:
        return None
    newest = max(complete)
    return MemoryPoint(newest, tuple(_local(rank, holders[newest][rank], host_of) for rank in range(world_size)))


def _local(owner: int, holder: int, host_of: Sequence[str]) -> int:
    """Return the owner if its own host has the snapshot, else the holder. All ranks of a host share its arena."""
    return owner if host_of[owner] == host_of[holder] else holder


def serving_rank(holder: int, owner: int, host_of: Sequence[str]) -> int:
    """Return the rank of the holder's host that sends a snapshot to its owner. The owners are spread over its ranks."""
    ranks = [rank for rank, host in enumerate(host_of) if host == host_of[holder]]
    return ranks[owner % len(ranks)]
