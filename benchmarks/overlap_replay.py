"""Ranks that compute and send, replayed: each has one processor, and one way out to all other ranks.

On the way out one thing goes after another at the link's rate. In which order is not given: it is replayed in that of
the rank's program, and in that in which things are ready to go if each had the way to itself; the shorter one counts.
Nothing else costs time: no latency, no waiting for a thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatrain.replay import Times, build_graph, evaluate


class LinkReplay:
    """What happens, and what waits for what. Everything is known by a number, in the order in which it was added."""

    def __init__(self) -> None:
        self._durations: list[float] = []
        self._lanes: list[int] = []
        self._numbers_of_lanes: dict[Hashable, int] = {}
        self._groups: list[int] = []
        self._numbers_of_groups: dict[Hashable, int] = {}
        self._sends: dict[int, list[int]] = {}
        self._edges: list[tuple[int, int]] = []

    def compute(self, rank: int, seconds: float, after: Sequence[int], group: Hashable = None) -> int:
        """Add a computation, after all earlier ones of its rank; members of a group begin together."""
        return self._add((rank, "compute"), seconds, after, group)

    def send(self, rank: int, lane: Hashable, seconds: float, after: Sequence[int], group: Hashable = None) -> int:
        """Add something that is sent, after all earlier ones of its lane; members of a group begin together."""
        number = self._add((rank, lane), seconds, after, group)
        self._sends.setdefault(rank, []).append(number)
        return number

    def wait(self, what: int, number: int) -> None:
        """Let `number` begin when `what` has ended."""
        self._edges.append((what, number))

    def ends(self) -> NDArray[np.float64]:
        """Return when everything ends."""
        ready = self._times({}).start
        by_readiness = {
            rank: sorted(sends, key=lambda number: (ready[number], number)) for rank, sends in self._sends.items()
        }
        found = [self._times(order).end for order in (self._sends, by_readiness)]
        return min(found, key=lambda end: float(end.max()))

    def _times(self, orders: dict[int, list[int]]) -> Times:
        """Replay with what each rank sends in this order. A rank that has none sends in all its lanes at once."""
        chains = [pair for order in orders.values() for pair in itertools.pairwise(order)]
        return evaluate(build_graph(self._lanes, self._edges + chains, start_groups=self._groups), self._durations)

    def _add(self, lane: Hashable, seconds: float, after: Sequence[int], group: Hashable) -> int:
        number = len(self._durations)
        self._durations.append(seconds)
        lanes, groups = self._numbers_of_lanes, self._numbers_of_groups
        self._lanes.append(lanes.setdefault(lane, len(lanes)))
        self._groups.append(-1 if group is None else groups.setdefault(group, len(groups)))
        self._edges += [(one, number) for one in after]
        return number
