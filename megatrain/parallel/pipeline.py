"""The pipeline runtime: carries out one stage's list of actions. What runs when is in the schedule, not here.

A receive is posted when its action comes up and awaited by the compute that consumes it; a send is let go when it is
delivered and awaited at the end of the pass at the latest. Of a chunk's output just the autograd edge is kept for
backward: its memory is free once it is sent (MegaScale sec. 3.2, decoupled sends and receives).
Shapes: S_local = seq_len / tp_size rows, B micro-batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatrain.comm.mesh import Mesh
from megatrain.comm.queue import Pending
from megatrain.contracts.operations import Operation
from megatrain.parallel.data_parallel import ChunkDataParallel
from megatrain.parallel.graphed_chunk import Backward, GraphedChunk
from megatrain.parallel.weight_products import PutOffProducts
from megatrain.schedule import Action, ActionKind, Placement, Schedule
from megatrain.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True)
class PipelineInput:
    """One micro-batch. Shapes: tokens and labels [S, B]; context is what the model wants to know besides."""

    tokens_SB: Tensor
    labels_SB: Tensor
    context: Any


@dataclass(frozen=True, slots=True)
class PipelineChunk:
    """One chunk on this stage: the module, the context its forward runs in, its buckets, and who replays it, if any."""

    module: nn.Module
    forward_context: AbstractContextManager[Any]
    data_parallel: ChunkDataParallel
    graphs: GraphedChunk | None = None

    def forward(self, x: Tensor, context: Any, labels_SB: Tensor | None) -> tuple[Tensor, Backward]:
        """Return the output without history, and its backward, which keeps just the autograd edge of the output."""
        with self.forward_context:
            out = self.module(x, context, labels_SB)
        edge = get_gradient_edge(out) if out.requires_grad else None
        return out.detach(), partial(_run_backward, edge, out.dtype)


@dataclass(slots=True)
class _Run:
    """What is in flight during one pass over a schedule."""

    placement: Placement
    inputs: Sequence[PipelineInput]
    loss_scale: Callable[[], Tensor] | None
    loss_sum: Tensor | None = None
    received: dict[tuple[ActionKind, int, int], Pending] = field(default_factory=dict)
    outgoing: dict[tuple[ActionKind, int, int], Tensor] = field(default_factory=dict)
    forward_sends: dict[tuple[int, int], Pending] = field(default_factory=dict)
    backward_sends: dict[tuple[int, int], Pending] = field(default_factory=dict)
    stage_inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    backwards: dict[tuple[int, int], Backward] = field(default_factory=dict)
    put_off: dict[tuple[int, int], PutOffProducts] = field(default_factory=dict)


class Pipeline:
    """This rank's stage of the pipeline: its chunks, and the interpreter of their schedule."""

    def __init__(
        self,
        mesh: Mesh,
        chunks: Sequence[PipelineChunk],
        recorder: Recorder,
        *,
        hidden_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """hidden_shape: (S_local, B, H), what travels between stages."""
        self.mesh = mesh
        self.chunks = tuple(chunks)
        self.recorder = recorder
        self.hidden_shape = hidden_shape
        self.dtype = dtype
        self.device = device

    def start_lead(self, schedule: Schedule) -> None:
        """Carry out what a step of this schedule begins with and what needs no batch: its first gathers.

        `train` and `evaluate` find them started.
        """
        for action in schedule.lead(self.mesh.coordinate["pp"]):
            self.chunks[action.chunk].data_parallel.start_gather()

    def train(self, schedule: Schedule, inputs: Sequence[PipelineInput], loss_scale: Callable[[], Tensor]) -> Tensor:
        """Run forward and backward of all micro-batches; gradients end up summed in the buckets.

        loss_scale gives the gradient of the summed loss (1 / number of label tokens); it is asked once, by the first
        backward. Returns the sum of this rank's losses over label tokens: 0 but on the last stage.
        """
        for chunk in self.chunks:
            chunk.data_parallel.expect(schedule.num_microbatches)
        return self._run(schedule, inputs, cache(loss_scale))

    def evaluate(self, schedule: Schedule, inputs: Sequence[PipelineInput]) -> Tensor:
        """Run a forward-only schedule. Returns as `train` does."""
        with torch.no_grad():
            return self._run(schedule, inputs, None)

    def _run(
        self, schedule: Schedule, inputs: Sequence[PipelineInput], loss_scale: Callable[[], Tensor] | None
    ) -> Tensor:
        run = _Run(schedule.placement, inputs, loss_scale)
        for action in schedule.stages[self.mesh.coordinate["pp"]]:
            self._execute(action, run)
            _let_go(run.forward_sends)
            _let_go(run.backward_sends)
        for send in (*run.forward_sends.values(), *run.backward_sends.values()):
            send.wait()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        return total if run.loss_sum is None else total + run.loss_sum

    def _execute(self, action: Action, run: _Run) -> None:
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(action, run)
            case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                self._backward(action, run)
            case ActionKind.BACKWARD_WEIGHT:
                self._backward_weight(action, run)
            case ActionKind.SEND_FORWARD | ActionKind.SEND_BACKWARD:
                self._send(action, run)
            case ActionKind.RECV_FORWARD | ActionKind.RECV_BACKWARD:
                self._receive(action, run)
            case ActionKind.GATHER:
                self.chunks[action.chunk].data_parallel.start_gather()
            case ActionKind.REDUCE:
                self.chunks[action.chunk].data_parallel.reduce()

    def _forward(self, action: Action, run: _Run) -> None:
        chunk, key = self.chunks[action.chunk], (action.chunk, action.microbatch)
        micro = run.inputs[action.microbatch]
        is_first = run.placement.is_first(self.mesh.coordinate["pp"], action.chunk)
        is_last = run.placement.is_last(self.mesh.coordinate["pp"], action.chunk)
        if is_first:
            x = micro.tokens_SB
        else:
            x = run.received.pop((ActionKind.RECV_FORWARD, *key)).wait()
            if run.loss_scale is not None:
                x.requires_grad_()
                run.stage_inputs[key] = x
        chunk.data_parallel.use_parameters()
        forward = chunk.forward if run.loss_scale is None or chunk.graphs is None else chunk.graphs.forward
        with self.recorder.span(Operation.FORWARD_COMPUTE, microbatch=action.microbatch, chunk=action.chunk):
            out, backward = forward(x, micro.context, micro.labels_SB if is_last else None)
            if is_last:
                loss = out.to(torch.float64, copy=True)  # a replayed loss is overwritten by the next
                run.loss_sum = loss if run.loss_sum is None else run.loss_sum + loss
            else:
                run.outgoing[(ActionKind.SEND_FORWARD, *key)] = out
            if run.loss_scale is not None:
                run.backwards[key] = backward

    def _backward(self, action: Action, run: _Run) -> None:
        chunk, key = self.chunks[action.chunk], (action.chunk, action.microbatch)
        if run.placement.is_last(self.mesh.coordinate["pp"], action.chunk):
            assert run.loss_scale is not None
            gradient = run.loss_scale()
        else:
            gradient = run.received.pop((ActionKind.RECV_BACKWARD, *key)).wait()
        for other in self.chunks:
            other.data_parallel.settle()
        chunk.data_parallel.before_backward()
        with self.recorder.span(Operation.BACKWARD_COMPUTE, microbatch=action.microbatch, chunk=action.chunk):
            if action.kind is ActionKind.BACKWARD_INPUT:
                with chunk.data_parallel.weight_products.put_off() as run.put_off[key]:
                    run.backwards.pop(key)(gradient)
            else:
                run.backwards.pop(key)(gradient)
        stage_input = run.stage_inputs.pop(key, None)
        if stage_input is None:
            chunk.data_parallel.after_backward()
        else:  # the message goes first, for which another stage waits
            assert stage_input.grad is not None
            run.outgoing[(ActionKind.SEND_BACKWARD, *key)] = stage_input.grad

    def _backward_weight(self, action: Action, run: _Run) -> None:
        products = run.put_off.pop((action.chunk, action.microbatch))
        with self.recorder.span(Operation.BACKWARD_WEIGHT_COMPUTE, microbatch=action.microbatch, chunk=action.chunk):
            products.carry_out()

    def _send(self, action: Action, run: _Run) -> None:
        x = run.outgoing.pop((action.kind, action.chunk, action.microbatch)).contiguous()
        links = self.mesh.links
        assert links is not None
        if action.kind is ActionKind.SEND_FORWARD:
            channel, operation, sends = links.forward_to_next, Operation.FORWARD_SEND, run.forward_sends
        else:
            channel, operation, sends = links.backward_to_previous, Operation.BACKWARD_SEND, run.backward_sends
        pending = channel.send(x, operation, chunk=action.chunk, microbatch=action.microbatch)
        sends[(action.chunk, action.microbatch)] = pending
        if action.kind is ActionKind.SEND_BACKWARD:
            self.chunks[action.chunk].data_parallel.after_backward()

    def _receive(self, action: Action, run: _Run) -> None:
        links = self.mesh.links
        assert links is not None
        if action.kind is ActionKind.RECV_FORWARD:
            channel, operation = links.forward_from_previous, Operation.FORWARD_RECV
        else:
            channel, operation = links.backward_from_next, Operation.BACKWARD_RECV
        run.received[(action.kind, action.chunk, action.microbatch)] = channel.receive(
            self.hidden_shape,
            self.dtype,
            self.device,
            operation,
            chunk=action.chunk,
            microbatch=action.microbatch,
        )


def _run_backward(edge: GradientEdge | None, dtype: torch.dtype, gradient: Tensor) -> None:
    assert edge is not None, "a forward without grad mode has no backward"
    torch.autograd.backward([edge], [gradient.to(dtype)])


def _let_go(sends: dict[tuple[int, int], Pending]) -> None:
    """Drop the sends that are delivered, oldest first, and with them their memory."""
    while sends and (oldest := next(iter(sends.items())))[1].is_done():
        sends.pop(oldest[0]).wait()
