"""The interface of a group of several ranks to a communication library, with one implementation per library.

NcclCommunicator (nccl.py) runs exchanges on streams of the GPU, GlooCommunicator (gloo.py) in threads on CPUs. Each
defines what the library does for an exchange (a Transfer). Its `submit` determines when the exchange starts. Spans and
errors are created in one place for all libraries (exchange.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from megatrain.comm.exchange import Exchange, Pending, Transfer, Work

HALF = (torch.bfloat16, torch.float16)


class Communicator(ABC):
    """The exchanges of one of torch's process groups. Tensors are contiguous; peers and roots are global ranks.

    `timeout` limits the time of an exchange.
    """

    connects_at_first_message = False
    """Whether two ranks of a link connect at the first message between them (link_warmup.py), not when the group is
    created."""
    is_asynchronous = True
    """Whether a collective runs in parallel with the caller and returns a Work."""

    def __init__(self, process_group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.process_group = process_group
        self.timeout = timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit the time of every later exchange."""
        self.timeout = timeout
        dist.distributed_c10d._set_pg_timeout(timeout, self.process_group)

    @abstractmethod
    def all_gather(self, x: Tensor, out: Tensor) -> Transfer:
        """Gather every rank's `x` in group order. Shapes: x [n, ...], out [size * n, ...]; x may be this rank's slice
        of out."""

    @abstractmethod
    def reduce_scatter(self, x: Tensor, out: Tensor, *, sums_in_fp32: bool) -> Transfer:
        """Sum `x` and keep this rank's slice. Shapes: x [size * n, ...], out [n, ...]; out may be that slice of x.

        sums_in_fp32: half precision is summed in fp32 and rounded at most once.
        """

    @abstractmethod
    def all_to_all(self, x: Tensor, out: Tensor, sent: Sequence[int], received: Sequence[int]) -> Transfer:
        """Send parts of `x`, of the sizes `sent`, to the ranks in group order, and fill `out` with the parts received.

        Shapes: x [sum(sent)], out [sum(received)].
        """

    def all_reduce(self, x: Tensor, *, maximum: bool) -> Transfer:
        """Sum `x`, or take its maximum, in place."""
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        return Transfer(lambda: dist.all_reduce(x, op, group=self.process_group, async_op=self.is_asynchronous))

    def broadcast(self, x: Tensor, root: int) -> Transfer:
        """Fill `x` with the `x` of `root`."""
        return Transfer(lambda: dist.broadcast(x, root, group=self.process_group, async_op=self.is_asynchronous))

    def gather(self, x: Tensor, out: list[Tensor] | None, root: int) -> Transfer:
        """Fill `out` with every rank's `x` in group order. `out` is None except at `root`."""
        return Transfer(lambda: dist.gather(x, out, root, group=self.process_group, async_op=self.is_asynchronous))

    @abstractmethod
    def send(self, x: Tensor, peer: int) -> Transfer:
        """Send `x` to `peer`."""

    @abstractmethod
    def receive(self, x: Tensor, peer: int) -> Transfer:
        """Fill `x` with the tensor that `peer` sends."""

    @abstractmethod
    def submit(self, result: Tensor, exchange: Exchange) -> Pending:
        """Start `exchange`, which fills `result`, now or when its turn comes.

        Raises: CommunicationError if it cannot be started; the Pending raises later errors.
        """


def summed_parts(x: Tensor, out: Tensor, size: int, exchange_parts: Callable[[Tensor], Work | None]) -> Transfer:
    """Return a reduce-scatter in which this rank itself sums all ranks' parts, in rank order; half precision is summed
    in fp32 and rounded once.

    exchange_parts: starts the exchange that fills its argument with every rank's part for this rank. The argument has
    the shape of `x`.
    """
    arrived: list[Tensor] = []

    def sum_up() -> None:
        first, *others = arrived.pop().chunk(size)
        total = first.float() if first.dtype in HALF else first
        for part in others:
            total.add_(part)
        out.copy_(total)

    return Transfer(
        lambda: exchange_parts(arrived[0]), prepare=lambda: arrived.append(torch.empty_like(x)), then=sum_up
    )


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two contiguous tensors begin at the same offset of the same storage. Addresses cannot be compared:
    on the meta device all are 0."""
    return a.untyped_storage() is b.untyped_storage() and a.storage_offset() == b.storage_offset()
