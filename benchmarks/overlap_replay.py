"""Ranks that compute and send, replayed: each has one processor, and one way out to all other ranks.

On the way out one piece goes after another at the link's rate. Whatever can go goes at once: what a single rank waits
for, as a message to the next stage, before exchanges of a group, and among these what was ready first. Exchanges are
cut into pieces, so that a message waits for a piece at most, as on a link that they share.
Nothing else costs time: no latency, no waiting for a thread.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_PIECE_S = 0.01
"""A longer one would hold messages up; a shorter one changes a step of seconds by less than 1 % (found by halving)."""


@dataclass(slots=True, eq=False)
class _Piece:
    """A computation, a message, or a piece of an exchange."""

    number: int
    seconds: float
    link: int | None
    """The rank whose way out it takes."""
    is_message: bool
    num_awaited: int = 0
    """Pieces that must end before it can begin."""
    next: list[_Piece] = field(default_factory=list)
    members: list[_Piece] = field(default_factory=list)
    """Those that begin together with it, itself among them."""
    ready_at: float = math.inf
    end: float = math.nan

    @property
    def priority(self) -> tuple[bool, float, int]:
        return not self.is_message, self.ready_at, self.number


class LinkReplay:
    """What happens, and what waits for what. Everything is known by a number, in the order in which it was added."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._pieces_of: list[tuple[_Piece, _Piece]] = []
        """First and last piece of what has this number."""
        self._last_of_lanes: dict[Hashable, _Piece] = {}
        self._groups: dict[Hashable, list[_Piece]] = {}

    def compute(self, rank: int, seconds: float, after: Sequence[int], group: Hashable = None) -> int:
        """Add a computation, after all earlier ones of its rank; members of a group begin together."""
        return self._add([self._piece((rank, "compute"), seconds, group, link=None)], after)

    def send(self, rank: int, lane: Hashable, seconds: float, after: Sequence[int], group: Hashable = None) -> int:
        """Add something that is sent, after all earlier ones of its lane; members of a group begin together."""
        if group is None:
            return self._add([self._piece((rank, lane), seconds, None, link=rank)], after)
        num_pieces = max(1, math.ceil(seconds / _PIECE_S))
        pieces = [
            self._piece((rank, lane), seconds / num_pieces, (group, number), link=rank) for number in range(num_pieces)
        ]
        return self._add(pieces, after)

    def wait(self, what: int, number: int) -> None:
        """Let `number` begin when `what` has ended."""
        _wait(self._pieces_of[what][1], self._pieces_of[number][0])

    def ends(self) -> NDArray[np.float64]:
        """Return when everything ends. Once only."""
        now, busy = 0.0, set[int]()
        ready = {one for one in self._pieces if not one.num_awaited}
        for one in ready:
            one.ready_at = now
        running: list[tuple[float, int]] = []
        while ready or running:
            for one in sorted(ready, key=lambda one: one.priority):
                links = {member.link for member in one.members if member.link is not None}
                if one in ready and ready.issuperset(one.members) and not links & busy:
                    ready.difference_update(one.members)
                    busy |= links
                    for member in one.members:
                        member.end = now + member.seconds
                        heapq.heappush(running, (member.end, member.number))
            now = running[0][0]
            while running and running[0][0] <= now:
                ended = self._pieces[heapq.heappop(running)[1]]
                if ended.link is not None:
                    busy.discard(ended.link)
                for one in ended.next:
                    one.num_awaited -= 1
                    if not one.num_awaited:
                        one.ready_at = now
                        ready.add(one)
        return np.array([last.end for _first, last in self._pieces_of])

    def _piece(self, lane: Hashable, seconds: float, group: Hashable, link: int | None) -> _Piece:
        """Add a piece, after the last one of its lane."""
        piece = _Piece(len(self._pieces), seconds, link, is_message=link is not None and group is None)
        piece.members = [piece] if group is None else self._groups.setdefault(group, [])
        if group is not None:
            piece.members.append(piece)
        self._pieces.append(piece)
        before = self._last_of_lanes.get(lane)
        self._last_of_lanes[lane] = piece
        if before is not None:
            _wait(before, piece)
        return piece

    def _add(self, pieces: Sequence[_Piece], after: Sequence[int]) -> int:
        self._pieces_of.append((pieces[0], pieces[-1]))
        number = len(self._pieces_of) - 1
        for what in after:
            self.wait(what, number)
        return number


def _wait(what: _Piece, piece: _Piece) -> None:
    what.next.append(piece)
    piece.num_awaited += 1
