"""gloo: the exchanges on CPUs, and those on host memory that run in parallel with training.

This module adds two things that gloo lacks. Exchanges that a caller starts first and awaits later take turns in lanes
(lanes.py): one lane for the group's collectives, one for each direction of a link. Exchanges that are awaited at once
have no lane: the two thread switches would cost more than they save. For a reduce-scatter, the ranks exchange parts,
and each rank sums its own part: gloo's reduce-scatter is an all-reduce of a copy, with twice the bytes. gloo applies
the timeout of the group's creation to a send or receive unless `wait` gets a timeout, so each wait here passes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor
from torch import distributed as dist

from megatrain.comm.communicator import Communicator, is_same_memory, summed_parts
from megatrain.comm.exchange import Exchange, ExchangeRunner, Pending, Transfer, Work
from megatrain.comm.group_creation import missing_members_error, new_process_group
from megatrain.comm.group_plan import PlannedGroup
from megatrain.comm.lanes import AwaitedLane, Lane, submit_in

# torch 2.13 renamed this function; the old name still works but warns
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GlooCommunicator(Communicator):
    """A group's exchanges, run by gloo's threads.

    new_lane: makes a lane from its name, for a group whose exchanges are started first and awaited later; None for a
    group whose exchanges are awaited at once.
    """

    def __init__(
        self,
        runner: ExchangeRunner,
        planned: PlannedGroup,
        process_group: dist.ProcessGroup,
        timeout: timedelta,
        new_lane: Callable[[str], Lane | AwaitedLane] | None,
    ) -> None:
        super().__init__(process_group, timeout)
        self.new_lane = new_lane
        self._runner = runner
        self._name = planned.name
        self._ranks = planned.ranks
        self._rank = process_group.rank()
        self._lanes: dict[str, Lane | AwaitedLane] = {}
        """By link; the lane of collectives has the key ""."""

    def all_gather(self, x: Tensor, out: Tensor) -> Transfer:
        if self.new_lane is None:
            return Transfer(lambda: _ALL_GATHER(out, x, group=self.process_group, async_op=True))
        parts = out.chunk(len(self._ranks))
        if not is_same_memory(parts[self._rank], x):
            parts[self._rank].copy_(x)
        return Transfer(lambda: self._swap([x] * len(parts), parts))

    def reduce_scatter(self, x: Tensor, out: Tensor, *, sums_in_fp32: bool) -> Transfer:
        size = len(self._ranks)

        def exchange_parts(arrived: Tensor) -> Work:
            sent, parts = x.chunk(size), arrived.chunk(size)
            parts[self._rank].copy_(sent[self._rank])
            return self._swap(sent, parts)

        return summed_parts(x, out, size, exchange_parts)

    def all_to_all(self, x: Tensor, out: Tensor, sent: Sequence[int], received: Sequence[int]) -> Transfer:
        own, arrived = x.split(list(sent)), out.split(list(received))

        def start() -> Work:
            arrived[self._rank].copy_(own[self._rank])
            return self._swap(own, arrived)

        return Transfer(start)

    def send(self, x: Tensor, peer: int) -> Transfer:
        return Transfer(lambda: self._combined(dist.isend(x, peer, group=self.process_group)))

    def receive(self, x: Tensor, peer: int) -> Transfer:
        return Transfer(lambda: self._combined(dist.irecv(x, peer, group=self.process_group)))

    def submit(self, result: Tensor, exchange: Exchange) -> Pending:
        if self.new_lane is None:
            return self._runner.submit(result, exchange)
        link = exchange.link
        if link not in self._lanes:
            self._lanes[link] = self.new_lane(f"{self._name}-{link}" if link else self._name)
        return submit_in(self._lanes[link], self._runner, result, exchange)

    def _swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Work:
        """Start sending `sent[i]` to member i, and receiving `received[i]` from it. Empty tensors are not sent.

        Receives start first. The receiver's permission to send uses the same connection as the receiver's own sends. If
        the send came first, the permission would wait behind it, and the two directions would run one after the other.
        """
        group, ranks = self.process_group, self._ranks
        others = [(self._rank + step) % len(ranks) for step in range(1, len(ranks))]
        receives = [other for other in others[::-1] if received[other].numel()]
        works = [dist.irecv(received[other], ranks[other], group=group) for other in receives]
        sends = [other for other in others if sent[other].numel()]
        return self._combined(*works, *(dist.isend(sent[other], ranks[other], group=group) for other in sends))

    def _combined(self, *works: dist.Work | None) -> Work:
        return _CombinedWork([work for work in works if work is not None], lambda: self.timeout)


class _CombinedWork:
    """Several sends and receives as one Work. timeout: called at each wait."""

    def __init__(self, works: Sequence[dist.Work], timeout: Callable[[], timedelta]) -> None:
        self._works = works
        self._timeout = timeout

    def wait(self) -> None:
        for work in self._works:
            work.wait(self._timeout())

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def create_process_group(planned: PlannedGroup, rank: int, store: dist.Store, timeout: timedelta) -> dist.ProcessGroup:
    """Create a group on CPUs whose members meet at `store` and connect to each other at once.

    Communication: gloo's rendezvous at the store.
    Raises: CommunicationError naming the group and the ranks that have not arrived.
    """
    # the key under which gloo writes each member's address
    arrivals = [f"{planned.key}//cpu//0/{index}" for index in range(len(planned.ranks))]
    with missing_members_error(planned, rank, store, arrivals, timeout):
        group = new_process_group(planned, rank, "gloo", store, timeout)
    return group
