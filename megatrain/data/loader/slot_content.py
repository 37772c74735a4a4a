"""The content of a slot: the micro-batches of one share of one step, as arrays at fixed places.

Legend: M micro-batches, B micro-batch, S sequence. A step with fewer micro-batches than M uses the first ones.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.step_plan import StepPlan
from megatrain.data.loader.ring_layout import WORD_BYTES, RingLayout
from megatrain.data.microbatch import MicroBatch
from megatrain.data.reader import StepBatch
from megatrain.data.sample_sources import SampleSources


class SlotContent:
    """The arrays of a slot of `layout` that begins at byte `start` of a writable buffer. They are not copied."""

    def __init__(self, buffer: Any, start: int, layout: RingLayout) -> None:
        self._buffer, self._start, self._offset = buffer, start, 0
        self._max_microbatches, self._slot_bytes = layout.max_microbatches, layout.slot_bytes
        per_sample = (layout.micro_batch_size,)
        per_token = (layout.seq_len, layout.micro_batch_size)
        self._numbers_M3 = self._next((3,))
        self._sample_MB = self._next(per_sample)
        self._num_labels_MB = self._next(per_sample)
        self._source_MB = self._next(per_sample)
        self._tokens_MSB = self._next(per_token)
        self._labels_MSB = self._next(per_token)
        self._document_MSB = self._next(per_token) if layout.has_document_mask else None

    def _next(self, shape: tuple[int, ...]) -> NDArray[np.int64]:
        full = (self._max_microbatches, *shape)
        array: NDArray[np.int64] = np.ndarray(full, np.int64, self._buffer, self._start + self._offset)
        self._offset += prod(full) * WORD_BYTES
        return array

    def put(self, batch: StepBatch) -> int:
        """Store a batch and return its number of micro-batches."""
        count = len(batch.microbatches)
        self._source_MB[:count] = 0 if batch.sources is None else batch.sources.source_MB
        # samples may be shorter than those for which the slot has room
        seq_len = batch.seq_len
        for number, one in enumerate(batch.microbatches):
            self._numbers_M3[number] = seq_len, one.squared_lengths, one.num_documents
            self._sample_MB[number] = one.sample_B
            self._num_labels_MB[number] = one.num_labels_B
            self._tokens_MSB[number, :seq_len] = one.tokens_SB
            self._labels_MSB[number, :seq_len] = one.labels_SB
            if self._document_MSB is not None and one.document_SB is not None:
                self._document_MSB[number, :seq_len] = one.document_SB
        return count

    def batch(self, count: int, plan: StepPlan, source_names: tuple[str, ...]) -> StepBatch:
        """Return the batch of `count` micro-batches that was stored. Its arrays of tokens are those of the slot.

        plan: of the step that was stored. source_names: the names of all sources.
        """
        num_labels_MB, source_MB = self._num_labels_MB[:count].copy(), self._source_MB[:count].copy()
        seq_len = int(self._numbers_M3[0, 0])
        microbatches = [
            MicroBatch(
                tokens_SB=self._tokens_MSB[number, :seq_len],
                labels_SB=self._labels_MSB[number, :seq_len],
                document_SB=None if self._document_MSB is None else self._document_MSB[number, :seq_len],
                sample_B=self._sample_MB[number].copy(),
                num_labels_B=num_labels_MB[number],
                squared_lengths=int(self._numbers_M3[number, 1]),
                num_documents=int(self._numbers_M3[number, 2]),
            )
            for number in range(count)
        ]
        return StepBatch(
            plan.cursor,
            plan.global_batch_size,
            microbatches,
            sum(one.num_label_tokens for one in microbatches),
            sum(one.squared_lengths for one in microbatches),
            sum(one.num_documents for one in microbatches),
            SampleSources(source_names, source_MB, num_labels_MB) if len(source_names) > 1 else None,
        )

    def put_error(self, text: str) -> int:
        """Store the text of an error, cut to the size of the slot, and return minus the number of its bytes."""
        encoded = text.encode(errors="replace")[: self._slot_bytes]
        self._bytes(len(encoded))[:] = encoded
        return -len(encoded)

    def error(self, count: int) -> str:
        """Return the text that was stored with this result of `put_error`."""
        return bytes(self._bytes(-count)).decode(errors="ignore")

    def _bytes(self, num_bytes: int) -> memoryview:
        return memoryview(self._buffer)[self._start : self._start + num_bytes]
