"""Micro-batches replayed from recordings, for models so small that the host cannot launch their work fast enough.

A recording (on a GPU, a CUDA graph) holds the device's work for one micro-batch: the same kernels on the same
memory, and nothing of the Python around them. So it stands for a micro-batch only while Python would decide all the
same again. What Python decides by is the key under which a recording is kept: which gradients have begun their sum
(those are added to, the others overwritten), and what the owner names beside. In a step there are two: the first
micro-batch, and those after it. Forward and backward are recorded apart, so that spans stay outside.
Not for pipelines: a backward must follow its forward, because recordings share their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatrain.parallel.data_parallel import ChunkDataParallel, WrittenGradients

STEPS_BEFORE_RECORDING = 2
"""Steps in which a kind of micro-batch runs before it is recorded: libraries choose, tables are made, kernels load."""

Backward = Callable[[Tensor], None]
"""Runs the backward of one forward, given the gradient of its output."""
Forward = Callable[[Tensor, Any, Tensor | None], tuple[Tensor, Backward]]
"""Runs a chunk on (x, context, labels) and returns its output without history, and its backward."""
Replay = Callable[[], None]


class Capture(Protocol):
    """Makes recordings, two and two: a forward, then its backward. They are replayed so; pairs may share memory."""

    def capture(self, work: Callable[[], None]) -> Replay:
        """Run `work` without carrying out what it tells the device; return what carries out just that, again and again.

        Raises: RuntimeError where `work` waits for the device or does something else that cannot be recorded.
        """


class CudaGraphCapture:
    """CUDA graphs of the current device that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(self, work: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: what NCCL's watchdog and the writer of snapshots do meanwhile is no part of the recording
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            raise RuntimeError(
                f"kernels.cuda_graphs: a micro-batch could not be recorded: {error}; use cuda_graphs=false"
            ) from error
        return graph.replay


class StaticContext(Protocol):
    """What a micro-batch's context must be able to do, so that a recording can read it from one place."""

    def clone(self) -> StaticContext:
        """Return the same in memory of its own."""

    def copy_(self, other: Any) -> None:
        """Take over the values of `other`. Raises: ValueError where they do not have the form of the own ones."""


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """Where recordings read a micro-batch."""

    x: Tensor
    context: StaticContext
    labels_SB: Tensor | None

    def copy_(self, x: Tensor, context: Any, labels_SB: Tensor | None) -> None:
        copy_same_form_("x", self.x, x)
        self.context.copy_(context)
        if self.labels_SB is not None and labels_SB is not None:
            copy_same_form_("labels_SB", self.labels_SB, labels_SB)


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    """One micro-batch: what runs it, where its loss and the gradient of that lie, and what it leaves written."""

    forward: Replay
    backward: Replay
    loss: Tensor
    gradient: Tensor
    written: WrittenGradients


class GraphedChunk:
    """Runs a chunk that is the whole model: the first steps as `forward` does, then from recordings of it."""

    def __init__(
        self, forward: Forward, data_parallel: ChunkDataParallel, capture: Capture, decisions: Callable[[], Hashable]
    ) -> None:
        """`decisions`: returns all that Python decides by in `forward` and its backward and that may change."""
        self._forward = forward
        self._data_parallel = data_parallel
        self._capture = capture
        self._decisions = decisions
        self._inputs: _Inputs | None = None
        self._recordings: dict[Hashable, _Recording] = {}
        self._first_steps: dict[Hashable, int] = {}
        self._num_steps = 0
        self._is_backward_due = False

    def forward(self, x: Tensor, context: Any, labels_SB: Tensor | None) -> tuple[Tensor, Backward]:
        """Return the loss and what runs backward, which must be called before the next forward.

        The loss is overwritten by the next forward.
        Raises: ValueError for another form of micro-batch than the recorded one; RuntimeError when a backward is due.
        """
        if self._is_backward_due:
            raise RuntimeError("a recorded forward came before the backward of the last one: they share their memory")
        written = self._data_parallel.written_gradients()
        if not any(map(any, written)):
            self._num_steps += 1
        key = (written, self._decisions())
        if key not in self._recordings:
            if self._num_steps < self._first_steps.setdefault(key, self._num_steps) + STEPS_BEFORE_RECORDING:
                return self._forward(x, context, labels_SB)
            self._recordings[key] = self._record(x, context, labels_SB)
        assert self._inputs is not None
        self._inputs.copy_(x, context, labels_SB)
        recording = self._recordings[key]
        recording.forward()
        self._is_backward_due = True
        return recording.loss, partial(self._backward, recording)

    def _backward(self, recording: _Recording, gradient: Tensor) -> None:
        recording.gradient.copy_(gradient)
        recording.backward()
        self._data_parallel.set_written_gradients(recording.written)
        self._is_backward_due = False

    def _record(self, x: Tensor, context: Any, labels_SB: Tensor | None) -> _Recording:
        if self._inputs is None:
            self._inputs = _Inputs(x.clone(), context.clone(), None if labels_SB is None else labels_SB.clone())
        inputs = self._inputs
        outcome: list[tuple[Tensor, Backward]] = []
        forward = self._capture.capture(
            lambda: outcome.append(self._forward(inputs.x, inputs.context, inputs.labels_SB))
        )
        ((loss, run_backward),) = outcome
        gradient = torch.empty_like(loss)
        backward = self._capture.capture(lambda: run_backward(gradient))
        # nothing is written yet, but the replays that follow make it true
        return _Recording(forward, backward, loss, gradient, self._data_parallel.written_gradients())


def copy_same_form_(name: str, target: Tensor, source: Tensor) -> None:
    """Copy `source` to `target`. Raises: ValueError where their shapes or types differ, which torch would bridge."""
    if source.shape != target.shape or source.dtype != target.dtype:
        raise ValueError(
            f"{name} must be {list(target.shape)} of {target.dtype} as in the recording, "
            f"got {list(source.shape)} of {source.dtype}"
        )
    target.copy_(source)
