"""The held-out set as micro-batches: one pass in file order, without shuffling, the same in every layout.

Windows are consecutive, and no two have a label in common. So every token except the first is predicted exactly once,
and the losses of all windows add up to the loss of the text.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatrain.contracts.errors import DataError
from megatrain.contracts.step_plan import NO_SAMPLE, Dealing, StepPlan
from megatrain.data.indexed import IndexedDataset
from megatrain.data.microbatch import MicroBatch, TokenWindow, assemble


def num_windows(dataset: IndexedDataset, seq_len: int) -> int:
    """Return the number of windows that cover `dataset`; the last may be shorter than `seq_len`.

    Raises: DataError when `dataset` has fewer than 2 tokens.
    """
    if dataset.num_tokens < 2:
        raise DataError(f"{dataset.prefix}: holds {dataset.num_tokens} tokens, evaluation needs 2; use more text")
    return -(-(dataset.num_tokens - 1) // seq_len)


def num_evaluated(dataset: IndexedDataset, seq_len: int, num_samples: int) -> int:
    """Return the number of windows in an evaluation of `num_samples` (0 = all)."""
    available = num_windows(dataset, seq_len)
    return min(num_samples or available, available)


def evaluation_batches(
    dataset: IndexedDataset,
    seq_len: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_samples: int = 0,
    has_document_mask: bool = False,
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of the first `num_samples` windows (0 = all).

    They are dealt as those of a training step. Every rank gets at least one, because all ranks gather the parameters.
    In empty micro-batches and in samples beyond the last window, all labels are -100.
    """
    num_samples = num_evaluated(dataset, seq_len, num_samples)
    num_microbatches = -(-num_samples // micro_batch_size)
    plan = StepPlan(0, num_microbatches * micro_batch_size, micro_batch_size, Dealing(num_microbatches, dp_size))
    for slot in plan.slots(dp_rank):
        samples_B = np.array(slot or (NO_SAMPLE,) * micro_batch_size, dtype=np.int64)
        starts_B = samples_B * seq_len
        label_counts_B = np.clip(dataset.num_tokens - 1 - starts_B, 0, seq_len)
        label_counts_B[(samples_B >= num_samples) | (samples_B == NO_SAMPLE)] = 0
        samples = [
            [TokenWindow(dataset, start, count)]
            for start, count in zip(starts_B.tolist(), label_counts_B.tolist(), strict=True)
        ]
        yield assemble(samples, samples_B, seq_len, has_document_mask)
