"""Micro-batches replayed from captured graphs, for models so small that the host cannot launch their work fast enough.

A captured graph (on a GPU, a CUDA graph) holds the device's work for one micro-batch: the same kernels on the same
memory, without the Python code that launched them. So a graph is valid only as long as that code would take the same
branches. The key of a graph is everything that the branches depend on: which sums of gradients have begun (a gradient
is added to these and overwrites the others), and the result of `decisions`. A step usually needs graphs of two keys:
one for the first micro-batch, and one for all others. Forward and backward are captured separately, so that the spans
around them are not part of a graph.
Not for pipelines: each backward must directly follow its forward, because graphs share their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatrain.parallel.data_parallel import ChunkDataParallel, WrittenGradients

STEPS_BEFORE_CAPTURE = 2
"""The number of steps that run the micro-batches of a key without a graph, before one is captured.

In these steps, libraries choose their algorithms, tables are computed and kernels are loaded.
"""

Backward = Callable[[Tensor], None]
"""Runs the backward of one forward, given the gradient of its output."""
Forward = Callable[[Tensor, Any, Tensor | None], tuple[Tensor, Backward]]
"""Runs a chunk on (x, context, labels) and returns its output, detached from the autograd graph, and its backward."""
Replay = Callable[[], None]


class Capture(Protocol):
    """Captures graphs in pairs: a forward, then its backward. Replays keep this order, so pairs may share memory."""

    def capture(self, work: Callable[[], None]) -> Replay:
        """Run `work` and capture its device work without executing it. Return the replay, which executes that work.

        Raises: RuntimeError when `work` waits for the device or does something else that cannot be captured.
        """


class CudaGraphCapture:
    """CUDA graphs of the current device that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(self, work: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: the work of other threads (NCCL's watchdog, the snapshot writer) is not captured
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            raise RuntimeError(
                f"kernels.cuda_graphs: a micro-batch could not be captured: {error}; use cuda_graphs=false"
            ) from error
        return graph.replay


class StaticContext(Protocol):
    """The methods that a micro-batch's context needs, so that a graph can read it from fixed memory."""

    def clone(self) -> StaticContext:
        """Return a copy in separate memory."""

    def copy_(self, other: Any) -> None:
        """Copy the values of `other`. Raises: ValueError when their form differs from this context's."""


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """The fixed memory from which graphs read a micro-batch."""

    x: Tensor
    context: StaticContext
    labels_SB: Tensor | None

    def copy_(self, x: Tensor, context: Any, labels_SB: Tensor | None) -> None:
        copy_same_form_("x", self.x, x)
        self.context.copy_(context)
        if self.labels_SB is not None and labels_SB is not None:
            copy_same_form_("labels_SB", self.labels_SB, labels_SB)


@dataclass(frozen=True, slots=True, eq=False)
class _CapturedGraphs:
    """The graphs of one micro-batch: of its forward, and of its backward.

    loss, gradient: the fixed memory of the loss, and of the loss's gradient. written: which sums of gradients have
    begun after a replay.
    """

    forward: Replay
    backward: Replay
    loss: Tensor
    gradient: Tensor
    written: WrittenGradients


class GraphedChunk:
    """Runs a chunk that is the whole model: with `forward` in the first steps, then from captured graphs of it."""

    def __init__(
        self,
        forward: Forward,
        data_parallel: ChunkDataParallel,
        capture: Capture,
        decisions: Callable[[Any], Hashable],
    ) -> None:
        """`decisions`: returns everything that may change and that Python code in `forward` or backward depends on,
        given the context of a micro-batch. Micro-batches with equal decisions have the same form."""
        self._forward = forward
        self._data_parallel = data_parallel
        self._capture = capture
        self._decisions = decisions
        self._inputs: dict[Hashable, _Inputs] = {}
        self._graphs: dict[Hashable, _CapturedGraphs] = {}
        self._first_steps: dict[Hashable, int] = {}
        self._num_steps = 0
        self._is_backward_due = False

    def forward(self, x: Tensor, context: Any, labels_SB: Tensor | None) -> tuple[Tensor, Backward]:
        """Return the loss and its backward, which must be called before the next forward.

        The next forward overwrites the loss.
        Raises: ValueError when the micro-batch has another form than the captured one; RuntimeError when the backward
        of the last forward has not run.
        """
        if self._is_backward_due:
            raise RuntimeError("a captured forward ran before the backward of the last one, which uses the same memory")
        written = self._data_parallel.written_gradients()
        if not any(map(any, written)):
            self._num_steps += 1
        decisions = self._decisions(context)
        key = (written, decisions)
        if key not in self._graphs:
            if self._num_steps < self._first_steps.setdefault(key, self._num_steps) + STEPS_BEFORE_CAPTURE:
                return self._forward(x, context, labels_SB)
            if decisions not in self._inputs:
                labels = None if labels_SB is None else labels_SB.clone()
                self._inputs[decisions] = _Inputs(x.clone(), context.clone(), labels)
            self._graphs[key] = self._capture_graphs(self._inputs[decisions])
        self._inputs[decisions].copy_(x, context, labels_SB)
        graphs = self._graphs[key]
        graphs.forward()
        self._is_backward_due = True
        return graphs.loss, partial(self._backward, graphs)

    def _backward(self, graphs: _CapturedGraphs, gradient: Tensor) -> None:
        graphs.gradient.copy_(gradient)
        graphs.backward()
        self._data_parallel.set_written_gradients(graphs.written)
        self._is_backward_due = False

    def _capture_graphs(self, inputs: _Inputs) -> _CapturedGraphs:
        outcome: list[tuple[Tensor, Backward]] = []
        forward = self._capture.capture(
            lambda: outcome.append(self._forward(inputs.x, inputs.context, inputs.labels_SB))
        )
        ((loss, run_backward),) = outcome
        gradient = torch.empty_like(loss)
        backward = self._capture.capture(lambda: run_backward(gradient))
        # the capture executed nothing, so nothing is written yet; the replay that follows writes what
        # written_gradients() lists
        return _CapturedGraphs(forward, backward, loss, gradient, self._data_parallel.written_gradients())


def copy_same_form_(name: str, target: Tensor, source: Tensor) -> None:
    """Copy `source` to `target`.

    Raises: ValueError when their shapes or dtypes differ; torch would broadcast or convert.
    """
    if source.shape != target.shape or source.dtype != target.dtype:
        raise ValueError(
            f"{name} must be {list(target.shape)} of {target.dtype} as in the captured graph, "
            f"got {list(source.shape)} of {source.dtype}"
        )
    target.copy_(source)
