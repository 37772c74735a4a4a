"""The memory of a chunk for one micro-batch: the trainer's own chunk runs on meta, and its tensors are counted.

Two micro-batches run forward and then backward, so that the effect of the second on the first is counted too: if all
blocks are offloaded, the last block's activations are freed during the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatrain.chunks.builder import BuiltChunk
from megatrain.parallel.deferred_wgrads import DeferredWgrads
from megatrain.parallel.graphed_chunk import Backward
from megatrain.parallel.pipeline import PipelineInput
from megatrain.planning.peak_tensor_bytes import PeakTensorBytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one chunk for one micro-batch. A chunk's input and a received gradient count from their first use."""

    kept: int
    """Kept from the forward to the backward."""
    forward: int
    """The peak of the forward, including what it keeps."""
    backward: int
    """The peak of the backward, including what is still kept; the peak of the dgrad if backward is split."""
    deferred: int = 0
    """Kept from the dgrad to the wgrad, if backward is split: the operands of the deferred wgrads."""
    weights: int = 0
    """The peak of the wgrad, without the operands of deferred wgrads."""
    on_host: int = 0
    """Kept from the forward to the backward in host memory."""
    kept_of_newest: int = 0
    """Kept in addition to `kept` until the next forward, which frees it: activations that are offloaded already."""
    forward_after_newest: int = 0
    """Like `forward`, if the previous micro-batch has not run backward: freeing `kept_of_newest` lowers the peak."""
    backward_of_newest: int = 0
    """Like `backward`, if the chunk has run no later forward."""
    early: int = 0
    """The increase of a backward's peak if buckets are reduced as soon as they are complete."""
    early_weights: int = 0
    """The increase of a wgrad's peak, if backward is split."""


class HostCopies:
    """Copies of meta tensors to host memory and back, which only have sizes. `memory` counts those on the host."""

    def __init__(self) -> None:
        self.memory = PeakTensorBytes(on_meta=True)

    def start_copy_to_host(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], None]:
        with _disable_current_modes():  # the copies do not count as device memory
            copies = [torch.empty_like(source) for source in sources]
        self.memory.include(copies)
        return copies, None

    def start_copy_to_device(self, copies: Sequence[Tensor], copied: Any) -> tuple[list[Tensor], None]:
        return [torch.empty_like(copy) for copy in copies], None

    def finish(self, pending: Any) -> None:
        """Do nothing: copies are complete at their start."""

    def abandon(self, sources: Sequence[Tensor]) -> None:
        """Do nothing, like finish()."""


@dataclass(frozen=True, slots=True)
class MeasuredChunk:
    """The memory measured in a run of the chunk. `num_microbatches`: the number of micro-batches that it ran."""

    footprint: Footprint
    tables: int
    """Bytes of the tables that the first micro-batch makes for all later ones."""
    num_microbatches: int


def measure(
    chunk: BuiltChunk,
    micro: PipelineInput,
    hidden_shape: Sequence[int],
    existing: Sequence[Tensor],
    host: PeakTensorBytes,
    *,
    is_split: bool,
    is_added: bool,
    is_by_bucket: bool,
) -> MeasuredChunk:
    """Run `chunk`, which is on meta, and count its memory.

    micro: a micro-batch, also on meta. existing: tensors that already exist, which are not counted. host: counts
    offloaded tensors. is_split: wgrads are deferred. is_added: gradients are added to those of earlier micro-batches.
    is_by_bucket: buckets are reduced as soon as they are complete.
    """
    chunk.meta.module.train()
    with PeakTensorBytes(on_meta=True).include(existing, tensors_of(micro)) as memory:
        run = _ChunkRun(chunk, micro, hidden_shape, memory, is_split=is_split, is_added=is_added)
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
            deferred=kept + backward.left,
            weights=weights,
            on_host=on_host,
            kept_of_newest=kept_of_newest,
            forward_after_newest=second.peak,
            backward_of_newest=kept + kept_of_newest + backward_of_newest.peak,
            early=early,
            early_weights=early_weights,
        ),
        tables,
        run.num_forwards,
    )


def parameter_tensors(chunk: BuiltChunk) -> list[Tensor]:
    """Return the tensors of the chunk's parameters and of their gradients, which are allocated if they are not."""
    buckets = chunk.data_parallel.buckets
    for bucket in buckets:
        if bucket.gradients is None:
            bucket.allocate_gradients()
    return [x for bucket in buckets for x in (bucket.values, bucket.gradients) if x is not None]


def tensors_of(micro: PipelineInput) -> list[Tensor]:
    """Return all tensors of a micro-batch."""
    documents, pictures = micro.context.documents, micro.context.pictures
    packed = [] if documents is None else [documents.number_SB, *documents.starts]
    patches = [] if pictures is None else [pictures.patches_PKC, pictures.place_K]
    return [micro.tokens_SB, micro.labels_SB, micro.context.sample_B, *packed, *patches]


@dataclass(frozen=True, slots=True)
class _Change:
    """The memory of one pass relative to its start: the peak, and what is left at the end, which may be negative."""

    peak: int
    left: int


class _ChunkRun:
    """Runs micro-batches of one chunk like the pipeline (parallel/pipeline.py)."""

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
        self.num_forwards = 0
        self._chunk = chunk
        self._micro = micro
        self._hidden_shape = hidden_shape
        self._memory = memory
        self._is_split = is_split
        self._is_added = is_added
        self._waiting: list[tuple[Tensor, Backward]] = []
        self._deferred: list[DeferredWgrads] = []

    def forward(self) -> _Change:
        self.num_forwards += 1
        before = self._begin()
        part, micro = self._chunk.meta.part, self._micro
        x = micro.tokens_SB if part.has_embedding else self._hidden().requires_grad_()
        out, backward = self._chunk.pipeline_chunk.forward(x, micro.context, micro.labels_SB if part.has_head else None)
        del out  # from here on it counts as a message
        self._waiting.append((x, backward))
        return self._change(before)

    def backward(self) -> _Change:
        """Run the backward of the oldest forward."""
        data_parallel = self._chunk.data_parallel
        data_parallel.set_written_gradients(
            tuple((self._is_added,) * len(bucket.parameters) for bucket in data_parallel.buckets)
        )
        before = self._begin()
        gradient = torch.zeros((), device="meta") if self._chunk.meta.part.has_head else self._hidden()
        x, run_backward = self._waiting.pop(0)
        with data_parallel.wgrads.deferring() if self._is_split else nullcontext() as products:
            run_backward(gradient)
        if products is not None:
            self._deferred.append(products)
        x.grad = None  # from here on it counts as a message
        del x, gradient, run_backward
        return self._change(before)

    def weights(self) -> int:
        """Run the wgrad that the oldest backward deferred, if any. Returns its peak relative to its start."""
        if not self._deferred:
            return 0
        before = self._begin()
        self._deferred.pop(0).carry_out()
        return self._change(before).peak

    def early(self) -> tuple[int, int]:
        """Return what reductions that start early add to the peak of the backward, and to the peak of its wgrad.

        Runs two micro-batches and reduces each. Buckets of the second one start early.
        """
        data_parallel = self._chunk.data_parallel
        peaks = []
        for is_by_bucket in (False, True):
            if is_by_bucket:
                data_parallel.overlap_by_bucket(self._chunk.meta.module)
            data_parallel.set_num_microbatches(1)
            data_parallel.before_backward()
            self.forward()
            peaks.append((self.backward().peak, self.weights()))
            data_parallel.after_backward()
            data_parallel.reduce()
            data_parallel.finish_reductions()
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
