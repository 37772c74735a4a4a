"""A channel carries tensors one way between two pipeline stages, first in first out.

Each direction has a process group of its own (and the wrap-around link too where two stages would share it with the
neighbour link), so that a send of one direction never queues behind a receive of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from megatrain.comm.group import Group, Pending
from megatrain.contracts.operations import Operation


@dataclass(frozen=True, slots=True)
class Channel:
    """One end of a link with the global rank `peer`. `number` is the link's in the black box."""

    group: Group
    peer: int
    number: int

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
        group, recorder = self.group, self.group.recorder
        token = recorder.begin(
            operation,
            microbatch=microbatch,
            chunk=chunk,
            num_bytes=x.numel() * x.element_size(),
            group=self.number,
        )
        side = "to" if is_send else "from"
        what = f"{operation.value} of chunk {chunk}, microbatch {microbatch} {side} rank {self.peer}"
        try:
            work = (dist.isend if is_send else dist.irecv)(x, self.peer, group=group.process_group)
        except RuntimeError as error:
            raise group.failure(what, error) from error

        def finish(work: dist.Work) -> None:
            recorder.await_end(token)
            try:
                if x.device.type == "cpu":
                    # gloo bounds a send or a receive by the timeout of the group's creation, unless it is given here
                    work.wait(group.timeout)
                else:
                    work.wait()  # NCCL watches over it by the group's timeout; one given here would block the host
            except RuntimeError as error:
                raise group.failure(what, error) from error
            recorder.end(token)

        return Pending(x, work, finish)
