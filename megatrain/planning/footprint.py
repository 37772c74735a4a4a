"""What a chunk needs in memory for a micro-batch: the trainer's own chunk is run on meta, and its tensors are counted.

Two micro-batches go forward and then backward, so that what the second one changes for the first is seen too: where all
blocks are offloaded, the last block's activations leave when the next forward begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatrain.chunk_builder import BuiltChunk
from megatrain.parallel.graphed_chunk import Backward
from megatrain.parallel.pipeline import PipelineInput
from megatrain.parallel.weight_products import PutOffProducts
from megatrain.planning.peak_tensor_bytes import PeakTensorBytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one chunk for one micro-batch. What a chunk is given counts from its use: its input, a gradient."""

    kept: int
    """From its forward to its backward."""
    forward: int
    """Most at once during its forward, with what it keeps."""
    backward: int
    """Most at once during its backward, with what is still kept; where that is split, during its half for the input."""
    put_off: int = 0
    """From one half of its backward to the other, where that is split: the factors of weights' gradients."""
    weights: int = 0
    """Most at once during the other half, beside what was put off."""
    on_host: int = 0
    """From its forward to its backward, in host memory instead."""
    kept_of_newest: int = 0
    """Beside `kept`, while no later micro-batch went forward: what has not left for the host yet."""
    forward_after_newest: int = 0
    """As `forward`, where the micro-batch before it is still the newest: what leaves then makes room."""
    backward_of_newest: int = 0
    """As `backward`, of the newest micro-batch."""
    early: int = 0
    """What the fullest moment of a backward has more where buckets are reduced as soon as they are whole."""
    early_weights: int = 0
    """The same of its other half, where it is split."""


class HostCopies:
    """Copies to host memory and back, of which only the sizes are real. `memory` counts those on the host."""

    def __init__(self) -> None:
        self.memory = PeakTensorBytes(on_meta=True)

    def start_leaving(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], None]:
        with _disable_current_modes():  # the device does not have them
            copies = [torch.empty_like(source) for source in sources]
        self.memory.include(copies)
        return copies, None

    def start_coming_back(self, copies: Sequence[Tensor], left: Any) -> tuple[list[Tensor], None]:
        return [torch.empty_like(copy) for copy in copies], None

    def finish(self, pending: Any) -> None:
        """All copies are made at once."""

    def abandon(self, sources: Sequence[Tensor]) -> None:
        """As finish()."""


@dataclass(frozen=True, slots=True)
class MeasuredChunk:
    """What a run of the chunk has shown."""

    footprint: Footprint
    tables: int
    """Bytes of what the first micro-batch makes for all that follow."""


def measure(
    chunk: BuiltChunk,
    micro: PipelineInput,
    hidden_shape: Sequence[int],
    standing: Sequence[Tensor],
    host: PeakTensorBytes,
    *,
    is_split: bool,
    is_added: bool,
    is_by_bucket: bool,
) -> MeasuredChunk:
    """Run `chunk`, which is on meta, and count.

    micro: a micro-batch, also on meta. standing: what does not count, because it is there already. host: counts what is
    offloaded. is_split: products that give weights' gradients are put off. is_added: gradients are added to those of
    earlier micro-batches. is_by_bucket: buckets are reduced as soon as they are whole.
    """
    chunk.meta.module.train()
    with PeakTensorBytes(on_meta=True).include(standing, tensors_of(micro)) as memory:
        run = _Run(chunk, micro, hidden_shape, memory, is_split=is_split, is_added=is_added)
        start = memory.live_bytes
        first = run.forward()
        on_host = host.live_bytes
        second = run.forward()
        on_host = host.live_bytes - on_host
        backward, backward_of_newest = run.backward(), run.backward()
        weights = max(run.weights(), run.weights())
        tables = memory.live_bytes - start
        early, early_weights = run.early() if is_by_bucket else (0, 0)
    kept = second.left
    kept_of_newest = first.left - tables - kept
    return MeasuredChunk(
        Footprint(
            kept=kept,
            forward=first.peak - tables,
            backward=kept + backward.peak,
            put_off=kept + backward.left,
            weights=weights,
            on_host=on_host,
            kept_of_newest=kept_of_newest,
            forward_after_newest=second.peak,
            backward_of_newest=kept + kept_of_newest + backward_of_newest.peak,
            early=early,
            early_weights=early_weights,
        ),
        tables,
    )


def standing_tensors(chunk: BuiltChunk) -> list[Tensor]:
    """Return the memory of the chunk's parameters and of their gradients."""
    chunk.data_parallel.before_backward()
    buckets = chunk.data_parallel.buckets
    return [x for bucket in buckets for x in (bucket.values, bucket.gradients) if x is not None]


def tensors_of(micro: PipelineInput) -> list[Tensor]:
    """Return all tensors of a micro-batch."""
    documents = micro.context.documents
    packed = [] if documents is None else [documents.number_SB, *documents.starts]
    return [micro.tokens_SB, micro.labels_SB, micro.context.sample_B, *packed]


@dataclass(frozen=True, slots=True)
class _Change:
    """Of one pass: the most beside what was there before, and what it leaves, which may be less than nothing."""

    peak: int
    left: int


class _Run:
    """Micro-batches of one chunk, as the pipeline runs them (parallel/pipeline.py)."""

    def __init__(
        self,
        chunk: BuiltChunk,
        micro: PipelineInput,
        hidden_shape: Sequence[int],
        memory: PeakTensorBytes,
        *,
        is_split: bool,
        is_added: bool,
    ) -> None:
        self._chunk = chunk
        self._micro = micro
        self._hidden_shape = hidden_shape
        self._memory = memory
        self._is_split = is_split
        self._is_added = is_added
        self._waiting: list[tuple[Tensor, Backward]] = []
        self._put_off: list[PutOffProducts] = []

    def forward(self) -> _Change:
        before = self._begin()
        part, micro = self._chunk.meta.part, self._micro
        x = micro.tokens_SB if part.has_embedding else self._hidden().requires_grad_()
        out, backward = self._chunk.pipeline_chunk.forward(x, micro.context, micro.labels_SB if part.has_head else None)
        del out  # a message from here on
        self._waiting.append((x, backward))
        return self._change(before)

    def backward(self) -> _Change:
        """Run that of the oldest forward."""
        data_parallel = self._chunk.data_parallel
        data_parallel.set_written_gradients(
            tuple((self._is_added,) * len(bucket.parameters) for bucket in data_parallel.buckets)
        )
        before = self._begin()
        gradient = torch.zeros((), device="meta") if self._chunk.meta.part.has_head else self._hidden()
        x, run_backward = self._waiting.pop(0)
        with data_parallel.weight_products.put_off() if self._is_split else nullcontext() as products:
            run_backward(gradient)
        if products is not None:
            self._put_off.append(products)
        x.grad = None  # a message from here on
        del x, gradient, run_backward
        return self._change(before)

    def weights(self) -> int:
        """Make up for what the oldest backward put off, if anything. Returns the most beside what was there before."""
        if not self._put_off:
            return 0
        before = self._begin()
        self._put_off.pop(0).carry_out()
        return self._change(before).peak

    def early(self) -> tuple[int, int]:
        """Return what reductions that start early add to the most of backward, and to that of its other half.

        Two micro-batches, each of which is reduced: while the first is, writes are counted, and no bucket starts early.
        """
        data_parallel = self._chunk.data_parallel
        data_parallel.overlap_by_bucket(self._chunk.meta.module)
        peaks = []
        for _ in range(2):
            data_parallel.expect(1)
            data_parallel.before_backward()
            self.forward()
            peaks.append((self.backward().peak, self.weights()))
            data_parallel.after_backward()
            data_parallel.reduce()
            data_parallel.finish_transfers()
        (backward, weights), (early_backward, early_weights) = peaks
        return max(0, early_backward - backward), max(0, early_weights - weights)

    def _hidden(self) -> Tensor:
        dtype = self._chunk.data_parallel.options.dtype
        return torch.empty(self._hidden_shape, dtype=dtype, device="meta")

    def _begin(self) -> int:
        self._memory.reset_peak()
        return self._memory.live_bytes

    def _change(self, before: int) -> _Change:
        return _Change(self._memory.peak_bytes - before, self._memory.live_bytes - before)
