"""Replay of ranks that compute and send. Each rank has one processor, and one outgoing link to all other ranks.

The link sends one piece after another at its rate, as soon as a piece can go. Messages that a single rank waits for,
such as one to the next stage, go before exchanges of a group; otherwise the piece that was ready first goes first.
Exchanges are cut into pieces, so that a message waits for at most one piece, as on a shared link.
Nothing else costs time: there is no latency and no wait for a thread.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_PIECE_S = 0.01
"""Longer pieces would delay messages. Half of this length changes a step of seconds by less than 1 %."""


@dataclass(slots=True, eq=False)
class _Piece:
    """A computation, a message, or a piece of an exchange."""

    number: int
    seconds: float
    link: int | None
    """The rank whose outgoing link it uses; None: a computation."""
    is_message: bool
    num_awaited: int = 0
    """The number of pieces that must end before it can begin."""
    next: list[_Piece] = field(default_factory=list)
    members: list[_Piece] = field(default_factory=list)
    """The pieces that begin together with it, including itself."""
    ready_at: float = math.inf
    end: float = math.nan

    @property
    def priority(self) -> tuple[bool, float, int]:
        return not self.is_message, self.ready_at, self.number


class LinkReplay:
    """Computations and messages with their dependencies. Each has a number, in the order in which it was added."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._pieces_of: list[tuple[_Piece, _Piece]] = []
        """By number, the first and the last piece."""
        self._last_of_lanes: dict[Hashable, _Piece] = {}
        self._groups: dict[Hashable, list[_Piece]] = {}

    def compute(self, rank: int, seconds: float, after: Sequence[int], group: Hashable = None) -> int:
        """Add a computation after all earlier ones of its rank. Members of a group begin together."""
        return self._add([self._piece((rank, "compute"), seconds, group, link=None)], after)

    def send(self, rank: int, lane: Hashable, seconds: float, after: Sequence[int], group: Hashable = None) -> int:
        """Add a message or an exchange after all earlier ones of its lane. Members of a group begin together."""
        if group is None:
            return self._add([self._piece((rank, lane), seconds, None, link=rank)], after)
        num_pieces = max(1, math.ceil(seconds / _PIECE_S))
        pieces = [
            self._piece((rank, lane), seconds / num_pieces, (group, number), link=rank) for number in range(num_pieces)
        ]
        return self._add(pieces, after)

    def wait(self, what: int, number: int) -> None:
        """Let `number` begin only when `what` has ended."""
        _wait(self._pieces_of[what][1], self._pieces_of[number][0])

    def ends(self) -> NDArray[np.float64]:
        """Return the ends of all computations and messages. Can be called only once."""
        now, busy = 0.0, set[int]()
        ready = {piece for piece in self._pieces if not piece.num_awaited}
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
        """Add a piece after the last one of its lane."""
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
