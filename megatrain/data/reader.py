"""Micro-batches of a step for one data-parallel rank, read directly from the memory-mapped tokens.

Sample j of micro-batch m on rank d is number cursor + (m * dp_size + d) * micro_batch_size + j. So a step's set of
samples depends only on cursor and global batch size, and a run may resume with another dp_size and see the same data.
Samples that a run leaves out do not count: the next sample takes the place.
The micro-batches of the held-out set are one pass in file order, without shuffling, the same in every layout.
Legend: S sequence, B micro-batch. Tensors are sequence-first, int64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.contracts.errors import DataError
from megatrain.contracts.sample_ranges import SampleRanges
from megatrain.data.indexed import IndexedDataset
from megatrain.data.order import SampleOrder
from megatrain.ops.cross_entropy import IGNORED_LABEL


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The input of one forward pass.

    labels_SB is the next token, or -100. document_SB numbers the documents within each window from 0, for attention
    that must not cross them; None when the run has no document mask. sample_B is the sample's number in the run.
    """

    tokens_SB: Tensor
    labels_SB: Tensor
    document_SB: Tensor | None
    sample_B: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """One rank's micro-batches of a step.

    `num_label_tokens` counts their labels that have a loss; `squared_lengths` measures the cost of their attention (see
    the function of that name).
    """

    cursor: int
    global_batch_size: int
    microbatches: list[MicroBatch]
    num_label_tokens: int
    squared_lengths: int = 0


@dataclass(frozen=True, slots=True)
class BatchReader:
    """Reads any step of a run. It has no state: a first read of step 1,000 costs as much as a first read of step 0."""

    dataset: IndexedDataset
    order: SampleOrder
    has_document_mask: bool = False

    def read_step(
        self,
        cursor: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        micro_batch_size: int,
        skipped: SampleRanges = (),
    ) -> StepBatch:
        """Return this rank's part of the step that starts at sample `cursor`; `skipped` samples are left out.

        Raises: ValueError when the global batch is not a whole number of micro-batches per rank; DataError when a token
        is outside the vocabulary.
        """
        num_microbatches, rest = divmod(global_batch_size, micro_batch_size * dp_size)
        if rest:
            raise ValueError(
                f"global_batch_size={global_batch_size} is not a multiple of micro_batch_size={micro_batch_size} times "
                f"dp_size={dp_size}"
            )
        samples_MB = positions(cursor, dealt(num_microbatches, dp_rank, dp_size, micro_batch_size), skipped)
        starts_MB = self.order.window_starts(samples_MB.ravel()).reshape(samples_MB.shape)
        seq_len = self.order.seq_len
        label_counts_B = np.full(micro_batch_size, seq_len)
        microbatches = [
            assemble(self.dataset, starts_B, label_counts_B, samples_B, seq_len, self.has_document_mask)
            for starts_B, samples_B in zip(starts_MB, samples_MB, strict=True)
        ]
        return StepBatch(
            cursor,
            global_batch_size,
            microbatches,
            sum(map(num_label_tokens, microbatches)),
            sum(map(squared_lengths, microbatches)),
        )


def dealt(num_microbatches: int, dp_rank: int, dp_size: int, micro_batch_size: int) -> NDArray[np.int64]:
    """Return the samples of a rank, counted from the step's first sample.

    Shapes: result [num_microbatches, micro_batch_size].
    """
    rows_M1 = np.arange(num_microbatches, dtype=np.int64)[:, None] * dp_size + dp_rank
    return rows_M1 * micro_batch_size + np.arange(micro_batch_size, dtype=np.int64)


def positions(cursor: int, counts: NDArray[np.int64], skipped: SampleRanges) -> NDArray[np.int64]:
    """Return the position after each of `counts` samples from `cursor` on, where `skipped` samples do not count: the
    result of `position_after` for each count."""
    found = cursor + counts
    for first, end in skipped:
        if end > cursor:
            start = max(first, cursor)
            found = np.where(found >= start, found + (end - start), found)
    return found


def assemble(
    dataset: IndexedDataset,
    starts_B: NDArray[np.int64],
    label_counts_B: NDArray[np.int64],
    samples_B: NDArray[np.int64],
    seq_len: int,
    has_document_mask: bool,
) -> MicroBatch:
    """Return the micro-batch of windows that start at `starts_B` and have `label_counts_B` labels each.

    A window with fewer labels than `seq_len` is padded with token 0 and label -100. With `has_document_mask` the last
    token of a document gets label -100 too, because it would have to predict the first token of an unrelated document.
    """
    tokens_BS = np.zeros((len(starts_B), seq_len), dtype=np.int64)
    labels_BS = np.full((len(starts_B), seq_len), IGNORED_LABEL, dtype=np.int64)
    documents_BS = np.zeros((len(starts_B), seq_len), dtype=np.int64) if has_document_mask else None
    for row, (start, count) in enumerate(zip(starts_B.tolist(), label_counts_B.tolist(), strict=True)):
        if count == 0:
            continue
        window = dataset.window(start, count + 1)
        tokens_BS[row, :count] = window[:-1]
        labels_BS[row, :count] = window[1:]
        if documents_BS is not None:
            firsts = dataset.document_starts_between(start + 1, start + count + 1) - start
            labels_BS[row, firsts - 1] = IGNORED_LABEL
            documents_BS[row] = np.searchsorted(firsts, np.arange(seq_len), side="right")
    return MicroBatch(
        tokens_SB=_sequence_first(tokens_BS),
        labels_SB=_sequence_first(labels_BS),
        document_SB=None if documents_BS is None else _sequence_first(documents_BS),
        sample_B=torch.from_numpy(samples_B.copy()),
    )


def num_label_tokens(microbatch: MicroBatch) -> int:
    """Return the number of positions that have a loss."""
    return int((microbatch.labels_SB != IGNORED_LABEL).sum())


def squared_lengths(microbatch: MicroBatch) -> int:
    """Return the sum of the squared lengths of the stretches that attend to themselves: the documents, or the whole
    windows without a document mask.

    Source: OSDI'25 sec. 5.2: the compute time of a micro-batch follows this sum.
    """
    seq_len, num_samples = microbatch.tokens_SB.shape
    if microbatch.document_SB is None:
        return int(num_samples * seq_len**2)
    lengths = (np.bincount(documents_S) for documents_S in microbatch.document_SB.numpy().T)
    return sum(int((length**2).sum()) for length in lengths)


def _sequence_first(values_BS: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values_BS.T))


def num_windows(dataset: IndexedDataset, seq_len: int) -> int:
    """Return the number of windows that cover `dataset`; the last may be shorter than `seq_len`.

    Raises: DataError when `dataset` has fewer than 2 tokens.
    """
    if dataset.num_tokens < 2:
        raise DataError(f"{dataset.prefix}: holds {dataset.num_tokens} tokens, evaluation needs 2; use more text")
    return -(-(dataset.num_tokens - 1) // seq_len)


def evaluation_batches(
    dataset: IndexedDataset,
    seq_len: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_samples: int = 0,
    has_document_mask: bool = False,
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of the first `num_samples` windows of the held-out set (0 = all).

    Windows are consecutive and have no label in common. So every token except the first is predicted exactly once, and
    the sum of the losses over all windows is the loss of the text.
    Every rank gets the same number of micro-batches, as pipelines and collectives need. Samples beyond the last window
    only have labels -100.
    """
    num_samples = min(num_samples or num_windows(dataset, seq_len), num_windows(dataset, seq_len))
    num_microbatches = -(-num_samples // (micro_batch_size * dp_size))
    for samples_B in dealt(num_microbatches, dp_rank, dp_size, micro_batch_size):
        starts_B = samples_B * seq_len
        label_counts_B = np.clip(dataset.num_tokens - 1 - starts_B, 0, seq_len)
        label_counts_B[samples_B >= num_samples] = 0
        yield assemble(dataset, starts_B, label_counts_B, samples_B, seq_len, has_document_mask)
