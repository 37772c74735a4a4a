"""A set of ranks that communicate, and the collectives on it.

A group of one does nothing and costs nothing: callers never ask whether an axis is used. Asynchronous calls return a
Pending; its `wait` gives the result. Sums are made in the tensor's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from megatrain.comm.queue import AwaitedLane, CommunicationQueue, Exchange, Lane, Pending, Work
from megatrain.contracts.errors import CommunicationError
from megatrain.contracts.operations import Operation

# torch 2.13 renamed these two; the old names still work but warn
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_HALF = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Group:
    """Ranks of one axis, in axis order.

    `number` is the group's in the black box; `process_group` is None for a group of one; every collective goes through
    `lane` where there is one; `num_calls` counts the collectives submitted, so that an error can say which of them
    failed; `timeout` bounds an exchange.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    queue: CommunicationQueue
    number: int = 0
    process_group: dist.ProcessGroup | None = None
    lane: Lane | AwaitedLane | None = None
    num_calls: int = 0
    timeout: timedelta = timedelta(minutes=5)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_gather(self, x: Tensor, operation: Operation, *, out: Tensor | None = None, chunk: int = -1) -> Pending:
        """Start joining every rank's `x` along dim 0, in group order. `chunk`: of the stage, for the records.

        Shapes: x [n, ...] contiguous; result [size * n, ...], `out` where given (x may be its own slice).
        Communication: one all-gather, (size - 1) * x bytes received per rank.
        """
        if self.process_group is None:
            return Pending(_copied(x, out))
        if out is None:
            out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        if self.lane is not None:
            own = out.chunk(self.size)[self.rank]
            if not _is_same_memory(own, x):
                own.copy_(x)
            return self._start(operation, out, x, lambda: self._swap([x] * self.size, out.chunk(self.size)), chunk)
        return self._start(
            operation, out, x, lambda: _ALL_GATHER(out, x, group=self.process_group, async_op=True), chunk
        )

    def reduce_scatter(
        self, x: Tensor, operation: Operation, *, out: Tensor | None = None, chunk: int = -1, has_wide_sum: bool = False
    ) -> Pending:
        """Start summing `x` over the group, keeping this rank's slice of dim 0. `chunk`: of the stage, for the records.

        has_wide_sum: half precision is summed in fp32 and rounded at most once: `out` may be of fp32 then. For that
        ranks exchange their parts, and each sums its own in rank order; on gloo they always do, as its own
        reduce-scatter sends twice the bytes.
        Shapes: x [size * n, ...] contiguous; result [n, ...], `out` where given (it may be x's own slice).
        Communication: one reduce-scatter or all-to-all, (size - 1) / size of x's bytes sent per rank.
        Raises: ValueError when dim 0 does not divide.
        """
        if x.shape[0] % self.size:
            raise ValueError(f"reduce-scatter over {self.name}: dim 0 of {tuple(x.shape)} must divide by {self.size}")
        if self.process_group is None:
            return Pending(_copied(x, out))
        if out is None:
            out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        if self.device_type(x) == "cpu" or (has_wide_sum and x.dtype in _HALF):
            return self._exchange_parts(x, operation, out, chunk)
        return self._start(
            operation, out, x, lambda: _REDUCE_SCATTER(out, x, group=self.process_group, async_op=True), chunk
        )

    def device_type(self, x: Tensor) -> str:
        """Return what kind of device carries out exchanges of `x`."""
        return x.device.type

    def _exchange_parts(self, x: Tensor, operation: Operation, out: Tensor, chunk: int) -> Pending:
        arrived: list[Tensor] = []

        def start() -> Work:
            if x.device.type != "cpu":
                return dist.all_to_all_single(arrived[0], x, group=self.process_group, async_op=True)
            sent, parts = x.chunk(self.size), arrived[0].chunk(self.size)
            parts[self.rank].copy_(sent[self.rank])
            return self._swap(sent, parts)

        return self._start(
            operation,
            out,
            x,
            start,
            chunk,
            prepare=lambda: arrived.append(torch.empty_like(x)),  # when the exchange's turn has come
            then=lambda: _sum_parts(arrived.pop(), self.size, out),
        )

    def _swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Work:
        """Start sending `sent[i]` to member i of a group on CPUs, and receiving `received[i]` from it.

        Receives go first: gloo tells a sender that he may begin on the connection whose other direction he sends on,
        and there the word would wait behind what is being sent, so that one direction would follow the other.
        """
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        works = [dist.irecv(received[other], self.ranks[other], group=self.process_group) for other in others[::-1]]
        works += [dist.isend(sent[other], self.ranks[other], group=self.process_group) for other in others]
        return _Together([work for work in works if work is not None], self.timeout)

    def all_reduce(self, x: Tensor, operation: Operation, *, maximum: bool = False) -> Pending:
        """Start summing (or taking the maximum of) `x` over the group, in place.

        Communication: one all-reduce, 2 * (size - 1) / size of x's bytes sent per rank.
        """
        if self.process_group is None:
            return Pending(x)
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        return self._start(operation, x, x, lambda: dist.all_reduce(x, op, group=self.process_group, async_op=True))

    def broadcast(self, x: Tensor, operation: Operation, *, source: int) -> Pending:
        """Start filling `x` on all ranks with that of the group's rank number `source`.

        Communication: one broadcast, x's bytes received per rank.
        """
        if self.process_group is None:
            return Pending(x)
        root = self.ranks[source]
        return self._start(operation, x, x, lambda: dist.broadcast(x, root, group=self.process_group, async_op=True))

    def gather(self, x: Tensor, operation: Operation) -> list[Tensor] | None:
        """Return every rank's `x`, of one shape, in group order at the group's first rank, None at the others. Blocks.

        Communication: one gather, (size - 1) * x bytes received at the first rank.
        """
        if self.process_group is None:
            return [x]
        out = [x.new_empty(x.shape) for _ in self.ranks] if self.rank == 0 else None
        root = self.ranks[0]
        self._start(operation, x, x, lambda: dist.gather(x, out, root, group=self.process_group, async_op=True)).wait()
        return out

    def set_timeout(self, seconds: float) -> None:
        """Bound every later exchange on this group."""
        self.timeout = timedelta(seconds=seconds)
        if self.process_group is not None:
            dist.distributed_c10d._set_pg_timeout(self.timeout, self.process_group)

    def _start(
        self,
        operation: Operation,
        out: Tensor,
        sent: Tensor,
        start: Callable[[], Work],
        chunk: int = -1,
        prepare: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
    ) -> Pending:
        self.num_calls += 1
        what = f"{operation.value} number {self.num_calls}"
        exchange = Exchange(
            operation,
            self.number,
            sent.numel() * sent.element_size(),
            start,
            wait=lambda work: work.wait(),
            failure=lambda error: self.failure(what, error),
            chunk=chunk,
            prepare=prepare,
            then=then,
        )
        return self.queue.submit(out, exchange, self.lane)

    def failure(self, what: str, error: Exception) -> CommunicationError:
        """Return the error that names this rank's operation and the ranks involved."""
        cause = str(error).strip() or type(error).__name__
        return CommunicationError(
            f"{what} on group {self.name} (ranks {brief(self.ranks)}) failed on rank {self.ranks[self.rank]}: {cause} "
            f"(an exchange of this phase may take {self.timeout.total_seconds():g} s, see runtime.*_timeout_s)"
        )


class _Together:
    """Several sends and receives as one."""

    def __init__(self, works: Sequence[dist.Work], timeout: timedelta) -> None:
        self._works = works
        self._timeout = timeout

    def wait(self) -> None:
        for work in self._works:
            work.wait(self._timeout)  # gloo would bound it by the timeout of the group's creation

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _sum_parts(parts: Tensor, num_parts: int, out: Tensor) -> None:
    """Write the sum of equal parts along dim 0 to `out`, added in their order; half precision is rounded once."""
    first, *others = parts.chunk(num_parts)
    total = first.float() if first.dtype in _HALF else first
    for part in others:
        total.add_(part)
    out.copy_(total)


def _copied(x: Tensor, out: Tensor | None) -> Tensor:
    """Return what a group of one gets: `x`, or `out` holding it. No copy is made where they share their memory."""
    if out is None:
        return x
    return out if _is_same_memory(out, x) else out.copy_(x)


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Say whether two contiguous tensors begin at one place of one storage. On meta all addresses are 0."""
    return a.untyped_storage() is b.untyped_storage() and a.storage_offset() == b.storage_offset()


def brief(ranks: tuple[int, ...]) -> str:
    """Return the ranks for a message; of many, the ends."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}; {len(ranks)} in all"
