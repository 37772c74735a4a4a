"""Held-out samples as micro-batches: one pass in the order of the files, the same in every layout.

Windows of text are consecutive, and no two have a label in common. So every token except the first is predicted exactly
once, and the losses of all windows add up to the loss of the text. The text of a sample with a picture is the caption.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from megatrain.checkpoint_format.sample_stream import MixtureStage
from megatrain.contracts.errors import DataError
from megatrain.contracts.step_plan import Dealing, StepPlan
from megatrain.data.indexed import IndexedDataset
from megatrain.data.mixture import Mixture
from megatrain.data.one_piece_order import OnePieceOrder
from megatrain.data.reader import BatchReader, ReadSlots
from megatrain.data.token_stream import Int64, SamplePieces
from megatrain.data.training_source import TrainingSource
from megatrain.formatting import count_text


@dataclass(frozen=True, slots=True)
class WindowOrder(OnePieceOrder):
    """Windows of a stream of `num_tokens` tokens, one after the other: a SourceOrder. The last window may be
    shorter."""

    num_tokens: int = 0

    def pieces(self, cursors: Int64) -> SamplePieces:
        """Return each window as the only piece of its sample."""
        lengths = self.lengths(cursors)
        starts = cursors * lengths
        labels = np.minimum(lengths, self.num_tokens - 1 - starts)
        return SamplePieces(starts, labels, np.arange(len(starts) + 1, dtype=np.int64))


def num_windows(dataset: IndexedDataset, seq_len: int) -> int:
    """Return the number of windows that cover `dataset`; the last may be shorter than `seq_len`.

    Raises: DataError when `dataset` has fewer than 2 tokens.
    """
    if dataset.num_tokens < 2:
        found = count_text(dataset.num_tokens, "token")
        raise DataError(f"{dataset.prefix}: holds {found}, and evaluation needs 2; use more text")
    return -(-(dataset.num_tokens - 1) // seq_len)


def held_out_reader(
    source: TrainingSource, seq_len: int, has_document_mask: bool = False, replaces_bad_samples: bool = False
) -> BatchReader:
    """Return the reader of one source, whose samples keep their order."""
    mixture = Mixture(0, (MixtureStage(0, (1,), seq_len),), 1)
    return BatchReader.of([source], mixture, has_document_mask, replaces_bad_samples)


def evaluation_batches(
    reader: BatchReader,
    num_samples: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    *,
    at_once: int = 1,
    has_patches: bool = True,
) -> Iterator[ReadSlots]:
    """Yield this rank's micro-batches of the first `num_samples` samples, up to `at_once` of them together.

    They are dealt as in a training step. Every rank gets at least one, because all ranks gather the parameters.
    In empty micro-batches, and in place of samples beyond the last one, all labels are -100. has_patches: see
    BatchReader.read_step.
    Raises: as BatchReader.read_step.
    """
    num_microbatches = -(-num_samples // micro_batch_size)
    plan = StepPlan(0, num_microbatches * micro_batch_size, micro_batch_size, Dealing(num_microbatches, dp_size))
    slots, seq_len = iter(plan.slots(dp_rank)), reader.mixture.seq_len(0)
    while group := list(islice(slots, at_once)):
        found = [tuple(number for number in slot if number < num_samples) for slot in group]
        yield reader.read_slots(found, micro_batch_size, seq_len, has_patches=has_patches)
