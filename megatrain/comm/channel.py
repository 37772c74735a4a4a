"""A channel carries tensors one way from a pipeline stage to the next model chunk's, first in first out.

Each direction has a process group of its own (and the wrap-around link too where two stages would share it with the
neighbour link), so that a send of one direction never queues behind a receive of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from megatrain.comm.group import Group
from megatrain.comm.queue import Exchange, Lane, Pending
from megatrain.contracts.operations import Operation


@dataclass(frozen=True, slots=True)
class Channel:
    """One end of a link with the global rank `peer`. `number` is the link's in the black box."""

    group: Group
    peer: int
    number: int
    lane: Lane | None = None

    def send(self, x: Tensor, operation: Operation, *, chunk: int, microbatch: int) -> Pending:
        """Start sending contiguous `x`; it must stay unchanged until the result was waited for."""
        return self._start(operation, x, chunk, microbatch, is_send=True)

    def receive(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        operation: Operation,
        *,
        chunk: int,
        microbatch: int,
    ) -> Pending:
        """Start receiving a tensor of `shape`."""
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        return self._start(operation, out, chunk, microbatch, is_send=False)

    def _start(self, operation: Operation, x: Tensor, chunk: int, microbatch: int, *, is_send: bool) -> Pending:
        group, call = self.group, dist.isend if is_send else dist.irecv
        side = "to" if is_send else "from"
        what = f"{operation.value} of chunk {chunk}, microbatch {microbatch} {side} rank {self.peer}"

        def start() -> dist.Work:
            work = call(x, self.peer, group=group.process_group)
            assert work is not None, "this rank is of the group"
            return work

        exchange = Exchange(
            operation,
            self.number,
            x.numel() * x.element_size(),
            start,
            # gloo bounds a send or a receive by the timeout of the group's creation, unless it is given here. NCCL
            # watches over it by the group's timeout, and one given here would block the host
            wait=(lambda work: work.wait(group.timeout)) if x.device.type == "cpu" else lambda work: work.wait(),
            failure=lambda error: group.failure(what, error),
            chunk=chunk,
            microbatch=microbatch,
        )
        return group.queue.submit(x, exchange, self.lane)


class LocalChannel:
    """A link from a stage to itself, where it has all the chunks: tensors are handed over, and nothing is copied."""

    def __init__(self) -> None:
        self._sent: dict[int, Tensor] = {}
        self._num_sent = 0
        self._num_receives = 0

    def send(self, x: Tensor, operation: Operation, *, chunk: int, microbatch: int) -> Pending:
        """Lay `x` down for the receive of the same number."""
        self._sent[self._num_sent] = x
        self._num_sent += 1
        return Pending(x)

    def receive(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        operation: Operation,
        *,
        chunk: int,
        microbatch: int,
    ) -> Pending:
        """Return what takes the tensor; it may be sent later than this is called, but not later than it is awaited."""
        number = self._num_receives
        self._num_receives += 1
        return _HandedOver(self._sent, number)


class _HandedOver(Pending):
    """What one send laid down."""

    __slots__ = ("_number", "_sent")

    def __init__(self, sent: dict[int, Tensor], number: int) -> None:
        self._sent = sent
        self._number = number

    def wait(self) -> Tensor:
        return self._sent.pop(self._number)

    def is_done(self) -> bool:
        return self._number in self._sent
