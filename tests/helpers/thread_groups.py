"""Groups whose ranks are threads of this process: they exchange tensors at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor

from megatrain.comm.exchange import Pending
from megatrain.comm.group import Group
from megatrain.comm.mesh import Mesh
from tests.helpers.single_rank import single_rank_mesh
from tests.helpers.waiting import DEADLINE_S

Rank = TypeVar("Rank")


class Meeting:
    """The place where the threads of one group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._brought: list[Sequence[Tensor]] = [()] * size

    def exchange(self, rank: int, brought: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Return the tensors of all ranks, in order. Each rank copies what it needs before its next call."""
        self._brought[rank] = [one.clone() for one in brought]
        self._barrier.wait(timeout=DEADLINE_S)
        found = list(self._brought)
        self._barrier.wait(timeout=DEADLINE_S)
        return found


class ThreadGroup(Group):
    """A group whose ranks are threads."""

    __slots__ = ("_meeting",)

    def __init__(self, name: str, meeting: Meeting, rank: int) -> None:
        super().__init__(name, tuple(range(meeting.size)), rank)
        self._meeting = meeting

    def all_reduce(self, x: Tensor, operation: object, *, maximum: bool = False) -> Pending:
        found = self._meeting.exchange(self.rank, [x])
        return Pending(x.copy_(torch.stack([one for (one,) in found]).sum(0)))

    def all_to_all(self, x: Tensor, operation: object, sent: Sequence[int], received: Sequence[int]) -> Pending:
        found = self._meeting.exchange(self.rank, x.split(list(sent)))
        parts = [brought[self.rank] for brought in found]
        assert [part.numel() for part in parts] == list(received)
        return Pending(torch.cat(parts))


def thread_meshes(dp_size: int, tp_size: int = 1) -> list[Mesh]:
    """Return the meshes of dp_size * tp_size ranks, tp varying fastest."""
    of_dp = [Meeting(dp_size) for _ in range(tp_size)]
    of_tp = [Meeting(tp_size) for _ in range(dp_size)]
    return [
        single_rank_mesh(dp=ThreadGroup("dp", of_dp[tp_rank], dp_rank), tp=ThreadGroup("tp", of_tp[dp_rank], tp_rank))
        for dp_rank, tp_rank in product(range(dp_size), range(tp_size))
    ]


def on_all(ranks: Sequence[Rank], follow: Callable[[Rank], None]) -> None:
    """Run `follow` for each rank, each in a thread. Raises: the exception of one of them."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        for _ in pool.map(follow, ranks):
            pass
