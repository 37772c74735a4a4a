"""Computes arrows from waiting ranks to the ranks that they wait for in a hang, few enough for a readable picture.

In a large job thousands of ranks wait for one rank. Then the arrows of all ranks of a stage (of one replica, or of all
replicas) are merged into one arrow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum

from megatrain.contracts.layout import STAGES, Layout

MAX_ARROWS = 200
"""A picture with more arrows is not readable."""


class Awaited(IntEnum):
    """State of the rank at the end of an arrow."""

    SUSPECT = 0
    SILENT = 1
    WAITING = 2
    """The rank waits too: it is in the middle of a chain."""
    OTHER = 3


@dataclass(frozen=True, slots=True)
class Arrow:
    """`waiting`: the rank, or the first of `num_waiting` ranks, that waits for `awaited`."""

    waiting: int
    awaited: int
    num_waiting: int
    kind: Awaited


def waiting_arrows(
    waits_for: Mapping[int, Collection[int]],
    suspects: Collection[int],
    silent: Collection[int],
    layout: Layout,
    most: int = MAX_ARROWS,
) -> tuple[Arrow, ...]:
    """Return at most `most` arrows, those to suspects first: one per waiting rank, or merged if there are too many.

    If there are too many even with one per stage, those of each kind with the most waiting ranks come first.
    """
    suspect_ranks, silent_ranks = frozenset(suspects), frozenset(silent)

    def kind_of(rank: int) -> Awaited:
        if rank in suspect_ranks:
            return Awaited.SUSPECT
        if rank in silent_ranks:
            return Awaited.SILENT
        return Awaited.WAITING if rank in waits_for else Awaited.OTHER

    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for together in (_alone, _by_replica, _by_stage):
        # ranks that wait in the same collective wait for the same ranks, so these identify the collective
        groups = {}
        for rank in sorted(waits_for):
            groups.setdefault((together(layout, rank), tuple(waits_for[rank])), []).append(rank)
        if sum(len(others) for _, others in groups) <= most:
            break
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for (group, others), ranks in groups.items():
        for other in others[:most]:
            first, count = found.get((group, other), (ranks[0], 0))
            found[group, other] = (min(first, ranks[0]), count + len(ranks))
    arrows = [Arrow(first, other, count, kind_of(other)) for (_, other), (first, count) in found.items()]
    arrows.sort(key=lambda arrow: (arrow.kind, -arrow.num_waiting, arrow.awaited, arrow.waiting))
    return tuple(arrows[:most])


def _alone(layout: Layout, rank: int) -> int:
    return rank


def _by_replica(layout: Layout, rank: int) -> int:
    return rank // layout.stride("dp")


def _by_stage(layout: Layout, rank: int) -> int:
    return rank // layout.stride(STAGES)
