"""The pipeline runtime: carries out one stage's list of actions, in the order of the schedule.

A receive is posted at its action, and the compute that uses its result waits for it. The memory of a send is freed once
it is delivered, and all sends are awaited at the end of the pass. Backward needs only the autograd edge of a chunk's
output, so the output's memory is free once it is sent (MegaScale sec. 3.2, decoupled sends and receives).
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
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from megatrain.comm.exchange import Pending
from megatrain.comm.mesh import Mesh
from megatrain.contracts.black_box.operations import Operation
from megatrain.parallel.data_parallel import ChunkDataParallel
from megatrain.parallel.deferred_wgrads import DeferredWgrads
from megatrain.parallel.graphed_chunk import Backward, GraphedChunk
from megatrain.schedule import Action, ActionKind, ChunkPlacement, Schedule
from megatrain.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True)
class PipelineInput:
    """One micro-batch. context: the model's other inputs. await_copies: makes the current stream wait until all tensors
    are on the device. Shapes: tokens and labels [S, B].
    """

    tokens_SB: Tensor
    labels_SB: Tensor
    context: Any
    await_copies: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class PipelineChunk:
    """One chunk on this stage.

    forward_context: the context in which the module's forward runs. graphs: replays the chunk from captured graphs, if
    set.
    sample_losses_B: memory that each forward in training overwrites with the loss of each sample, if set.
    """

    module: nn.Module
    forward_context: AbstractContextManager[Any]
    data_parallel: ChunkDataParallel
    graphs: GraphedChunk | None = None
    sample_losses_B: Tensor | None = None

    def forward(self, x: Tensor, context: Any, labels_SB: Tensor | None) -> tuple[Tensor, Backward]:
        """Return the output, detached from the autograd graph, and its backward, which keeps only its edge."""
        with self.forward_context:
            out = self.module(x, context, labels_SB)
        edge = get_gradient_edge(out) if out.requires_grad else None
        return out.detach(), partial(_run_backward, edge, out.dtype)


@dataclass(frozen=True, slots=True)
class TrainingLosses:
    """The losses of this rank's micro-batches over their label tokens, fp64.

    total: their sum, 0 except on the last stage. samples_MB: the loss of each sample if the last chunk keeps them, else
    None.
    Shapes: total scalar; samples [M, B].
    """

    total: Tensor
    samples_MB: Tensor | None


@dataclass(slots=True)
class _ScheduleRun:
    """The state of one pass over a schedule: exchanges in flight, and tensors that wait for later actions."""

    placement: ChunkPlacement
    inputs: Sequence[PipelineInput]
    loss_scale: Callable[[], Tensor] | None
    loss_sum: Tensor | None = None
    sample_losses: dict[int, Tensor] = field(default_factory=dict)
    received: dict[tuple[ActionKind, int, int], Pending] = field(default_factory=dict)
    outgoing: dict[tuple[ActionKind, int, int], Tensor] = field(default_factory=dict)
    forward_sends: dict[tuple[int, int], Pending] = field(default_factory=dict)
    backward_sends: dict[tuple[int, int], Pending] = field(default_factory=dict)
    stage_inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    backwards: dict[tuple[int, int], Backward] = field(default_factory=dict)
    deferred: dict[tuple[int, int], DeferredWgrads] = field(default_factory=dict)


class Pipeline:
    """This rank's stage of the pipeline: its chunks, and the interpreter of their schedule."""

    def __init__(
        self,
        mesh: Mesh,
        chunks: Sequence[PipelineChunk],
        recorder: Recorder,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.mesh = mesh
        self.chunks = tuple(chunks)
        self.recorder = recorder
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.device = device

    def hidden_shape(self, micro: PipelineInput) -> tuple[int, int, int]:
        """Return (S_local, B, H), the shape of the tensors that stages send each other for a micro-batch."""
        seq_len, num_samples = micro.tokens_SB.shape
        return seq_len // self.mesh.layout.tp_size, num_samples, self.hidden_size

    def start_initial_gathers(self, schedule: Schedule) -> None:
        """Start the gathers at the beginning of a step of this schedule. They need no batch.

        `train` and `evaluate` do not start them again.
        """
        for action in schedule.initial_gathers(self.mesh.stage):
            self.chunks[action.chunk].data_parallel.start_gather()

    def train(
        self, schedule: Schedule, inputs: Sequence[PipelineInput], loss_scale: Callable[[], Tensor]
    ) -> TrainingLosses:
        """Run forward and backward of all micro-batches, and sum their gradients in the buckets.

        loss_scale: returns the gradient of the summed loss (1 / number of label tokens); only the last stage calls it,
        once, in its first backward.
        """
        for chunk in self.chunks:
            chunk.data_parallel.set_num_microbatches(schedule.num_microbatches)
        run = self._run(schedule, inputs, cache(loss_scale))
        samples_B = [losses_B for _, losses_B in sorted(run.sample_losses.items())]
        return TrainingLosses(self._total(run), torch.stack(samples_B) if samples_B else None)

    def evaluate(self, schedule: Schedule, inputs: Sequence[PipelineInput]) -> Tensor:
        """Run a forward-only schedule. Return the summed loss of label tokens, fp64; 0 except on the last stage."""
        with torch.no_grad():
            return self._total(self._run(schedule, inputs, None))

    def _run(
        self, schedule: Schedule, inputs: Sequence[PipelineInput], loss_scale: Callable[[], Tensor] | None
    ) -> _ScheduleRun:
        run = _ScheduleRun(schedule.placement, inputs, loss_scale)
        for action in schedule.stages[self.mesh.stage]:
            self._execute(action, run)
            _release_delivered(run.forward_sends)
            _release_delivered(run.backward_sends)
        for send in (*run.forward_sends.values(), *run.backward_sends.values()):
            send.wait()
        return run

    def _total(self, run: _ScheduleRun) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        return total if run.loss_sum is None else total + run.loss_sum

    def _execute(self, action: Action, run: _ScheduleRun) -> None:
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(action, run)
            case ActionKind.BACKWARD | ActionKind.DGRAD:
                self._backward(action, run)
            case ActionKind.WGRAD:
                self._backward_weight(action, run)
            case ActionKind.SEND_FORWARD | ActionKind.SEND_BACKWARD:
                self._send(action, run)
            case ActionKind.RECV_FORWARD | ActionKind.RECV_BACKWARD:
                self._receive(action, run)
            case ActionKind.GATHER:
                self.chunks[action.chunk].data_parallel.start_gather()
            case ActionKind.REDUCE:
                self.chunks[action.chunk].data_parallel.reduce()

    def _forward(self, action: Action, run: _ScheduleRun) -> None:
        chunk, key = self.chunks[action.chunk], (action.chunk, action.microbatch)
        micro = run.inputs[action.microbatch]
        is_first = run.placement.is_first(self.mesh.stage, action.chunk)
        is_last = run.placement.is_last(self.mesh.stage, action.chunk)
        if is_first:
            x = micro.tokens_SB
        else:
            x = run.received.pop((ActionKind.RECV_FORWARD, *key)).wait()
            if run.loss_scale is not None:
                x.requires_grad_()
                run.stage_inputs[key] = x
        chunk.data_parallel.await_parameters()
        micro.await_copies()
        forward = chunk.forward if run.loss_scale is None or chunk.graphs is None else chunk.graphs.forward
        with self.recorder.span(Operation.FORWARD_COMPUTE, microbatch=action.microbatch, chunk=action.chunk):
            out, backward = forward(x, micro.context, micro.labels_SB if is_last else None)
            if is_last:
                loss = out.to(torch.float64, copy=True)  # the next replay overwrites the loss
                run.loss_sum = loss if run.loss_sum is None else run.loss_sum + loss
                if chunk.sample_losses_B is not None and run.loss_scale is not None:
                    run.sample_losses[action.microbatch] = chunk.sample_losses_B.clone()
            else:
                run.outgoing[(ActionKind.SEND_FORWARD, *key)] = out
            if run.loss_scale is not None:
                run.backwards[key] = backward

    def _backward(self, action: Action, run: _ScheduleRun) -> None:
        chunk, key = self.chunks[action.chunk], (action.chunk, action.microbatch)
        if run.placement.is_last(self.mesh.stage, action.chunk):
            assert run.loss_scale is not None
            gradient = run.loss_scale()
        else:
            gradient = run.received.pop((ActionKind.RECV_BACKWARD, *key)).wait()
        for other in self.chunks:
            other.data_parallel.finish_earlier_reductions()
        chunk.data_parallel.before_backward()
        with self.recorder.span(Operation.BACKWARD_COMPUTE, microbatch=action.microbatch, chunk=action.chunk):
            if action.kind is ActionKind.DGRAD:
                with chunk.data_parallel.wgrads.deferring() as run.deferred[key]:
                    run.backwards.pop(key)(gradient)
            else:
                run.backwards.pop(key)(gradient)
        stage_input = run.stage_inputs.pop(key, None)
        if stage_input is None:
            chunk.data_parallel.after_backward()
        else:  # the send goes first, because another stage waits for it; _send calls after_backward
            assert stage_input.grad is not None
            run.outgoing[(ActionKind.SEND_BACKWARD, *key)] = stage_input.grad

    def _backward_weight(self, action: Action, run: _ScheduleRun) -> None:
        products = run.deferred.pop((action.chunk, action.microbatch))
        with self.recorder.span(Operation.BACKWARD_WEIGHT_COMPUTE, microbatch=action.microbatch, chunk=action.chunk):
            products.carry_out()

    def _send(self, action: Action, run: _ScheduleRun) -> None:
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

    def _receive(self, action: Action, run: _ScheduleRun) -> None:
        links = self.mesh.links
        assert links is not None
        if action.kind is ActionKind.RECV_FORWARD:
            channel, operation = links.forward_from_previous, Operation.FORWARD_RECV
        else:
            channel, operation = links.backward_from_next, Operation.BACKWARD_RECV
        run.received[(action.kind, action.chunk, action.microbatch)] = channel.receive(
            self.hidden_shape(run.inputs[action.microbatch]),
            self.dtype,
            self.device,
            operation,
            chunk=action.chunk,
            microbatch=action.microbatch,
        )


def _run_backward(edge: GradientEdge | None, dtype: torch.dtype, gradient: Tensor) -> None:
    assert edge is not None, "a forward that ran without grad mode has no backward"
    # torch.autograd.backward calls this function after a check of shapes, which the engine repeats. The check imports
    # sympy: 1 to 2 s of processor time in the first backward of each rank.
    _engine_run_backward((edge,), (gradient.to(dtype),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _release_delivered(sends: dict[tuple[int, int], Pending]) -> None:
    """Drop the delivered sends, oldest first, to free their memory."""
    while sends and (oldest := next(iter(sends.items())))[1].is_done():
        sends.pop(oldest[0]).wait()
