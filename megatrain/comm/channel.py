"""A channel carries tensors one way, first in, first out: activations from a pipeline stage to the stage of the next
model chunk, gradients to the stage of the previous one.

PipelineLinks holds the channels of a stage. Each has a process group and the global rank at its other end.

Each direction has its own process group, so that a send of one direction never queues behind a receive of the other.
With two stages the wrap-around link joins the same pair as the neighbor link, so it has its own groups too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.comm.exchange import Exchange, Pending
from megatrain.comm.group import Group
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import STAGES
from megatrain.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Channel:
    """One end of a link with the global rank `peer`. `number` is the number of the link in the black box."""

    group: Group
    peer: int
    number: int

    def send(self, x: Tensor, operation: Operation, *, chunk: int, microbatch: int) -> Pending:
        """Start sending contiguous `x`; it must stay unchanged until the caller has waited for the result."""
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
        group, communicator = self.group, self.group.communicator
        assert communicator is not None, "a link has two ends"
        side = "to" if is_send else "from"
        what = f"{operation.value} of chunk {chunk}, micro-batch {microbatch} {side} rank {self.peer}"
        exchange = Exchange(
            operation,
            self.number,
            x.numel() * x.element_size(),
            communicator.send(x, self.peer) if is_send else communicator.receive(x, self.peer),
            failure=lambda error: group.failure(what, error),
            chunk=chunk,
            microbatch=microbatch,
            link=f"{side}-{self.peer}",
        )
        return communicator.submit(x, exchange)


class LocalChannel:
    """The link of a pipeline with one stage, from the stage to itself: it passes tensors on without a copy."""

    def __init__(self) -> None:
        self._sent: dict[int, Tensor] = {}
        self._num_sent = 0
        self._num_receives = 0

    def send(self, x: Tensor, operation: Operation, *, chunk: int, microbatch: int) -> Pending:
        """Keep `x` for the receive of the same number."""
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
        """Return a Pending of the tensor. The send may follow this call, but must come before the wait."""
        number = self._num_receives
        self._num_receives += 1
        return _LocalPending(self._sent, number)


class _LocalPending(Pending):
    """The result of a receive: `wait` returns the tensor of the send with the same number."""

    __slots__ = ("_number", "_sent")

    def __init__(self, sent: dict[int, Tensor], number: int) -> None:
        self._sent = sent
        self._number = number

    def wait(self) -> Tensor:
        return self._sent.pop(self._number)

    def is_done(self) -> bool:
        return self._number in self._sent


@dataclass(frozen=True, slots=True)
class PipelineLinks:
    """The channels of one stage. Activations go to the next stage, and from the last stage to the first for the next
    chunk."""

    forward_to_next: Channel | LocalChannel
    forward_from_previous: Channel | LocalChannel
    backward_to_previous: Channel | LocalChannel
    backward_from_next: Channel | LocalChannel

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The channels to other stages."""
        all_of_them = (self.forward_to_next, self.forward_from_previous,
                       self.backward_to_previous, self.backward_from_next)  # fmt: skip
        return tuple(channel for channel in all_of_them if isinstance(channel, Channel))

    @property
    def connect_at_first_message(self) -> bool:
        """Whether the two ranks of a link connect at the first message between them."""
        communicators = [channel.group.communicator for channel in self.channels]
        return any(
            communicator is not None and communicator.connects_at_first_message for communicator in communicators
        )


def create_links(
    stage: int, groups: Mapping[str, Group], recorder: Recorder, *, has_wrap_links: bool
) -> PipelineLinks | None:
    """Return the channels of a stage; None if one stage has the whole model as one chunk.

    groups: this rank's groups by name.
    """
    pp_ranks = groups[STAGES].ranks
    if len(pp_ranks) == 1:
        if not has_wrap_links:
            return None
        onward, back = LocalChannel(), LocalChannel()
        return PipelineLinks(onward, onward, back, back)
    forward, backward = groups["pp-forward"], groups["pp-backward"]
    forward_wrap = groups.get("pp-forward-wrap", forward)
    backward_wrap = groups.get("pp-backward-wrap", backward)
    last = len(pp_ranks) - 1

    def channel(direct: Group, wrap: Group, step: int, *, is_sender: bool) -> Channel:
        peer_stage = (stage + step) % len(pp_ranks)
        is_wrap = (stage, step) in ((last, +1), (0, -1))
        peer = pp_ranks[peer_stage]
        here = pp_ranks[stage]
        ends = (here, peer) if is_sender else (peer, here)
        over = wrap if is_wrap else direct
        return Channel(over, peer, recorder.add_group(over.name, ends))

    return PipelineLinks(
        forward_to_next=channel(forward, forward_wrap, +1, is_sender=True),
        forward_from_previous=channel(forward, forward_wrap, -1, is_sender=False),
        backward_to_previous=channel(backward, backward_wrap, -1, is_sender=True),
        backward_from_next=channel(backward, backward_wrap, +1, is_sender=False),
    )
