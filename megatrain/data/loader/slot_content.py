"""The content of a slot: the micro-batches of one share of one step, as arrays at fixed places.

Legend: M micro-batches, B micro-batch, S sequence, K pictures of a micro-batch, P patches, C bytes of a patch, U =
P * B * C. A step with fewer micro-batches than M uses the first ones, and a micro-batch with fewer pictures than B the
first bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.step_plan import StepPlan
from megatrain.data.bad_tokens import BadSample
from megatrain.data.loader.ring_layout import WORD_BYTES, RingLayout
from megatrain.data.microbatch import MicroBatch
from megatrain.data.patches import Patches
from megatrain.data.step_batch import SampleSources, StepBatch


class SlotContent:
    """The arrays of a slot of `layout` that begins at byte `start` of a writable buffer. They are not copied."""

    def __init__(self, buffer: Any, start: int, layout: RingLayout) -> None:
        self._buffer, self._start, self._offset = buffer, start, 0
        self._max_microbatches, self._slot_bytes = layout.max_microbatches, layout.slot_bytes
        per_sample = (layout.micro_batch_size,)
        per_token = (layout.seq_len, layout.micro_batch_size)
        self._numbers_M4 = self._next((4,))
        self._sample_MB = self._next(per_sample)
        self._num_labels_MB = self._next(per_sample)
        self._source_MB = self._next(per_sample)
        self._is_bad_MB = self._next(per_sample)
        self._has_picture_MB = self._next(per_sample)
        self._tokens_MSB = self._next(per_token)
        self._labels_MSB = self._next(per_token)
        self._document_MSB = self._next(per_token) if layout.has_document_mask else None
        self._picture_shape = layout.picture_shape
        full = (layout.max_microbatches, layout.micro_batch_size * prod(layout.picture_shape))
        self._patches_MU: Patches = np.ndarray(full, np.uint8, buffer, start + self._offset)
        self._offset += self._patches_MU.nbytes
        self._reasons = Reasons(memoryview(buffer)[start + self._offset :][: layout.text_bytes])

    def _next(self, shape: tuple[int, ...]) -> NDArray[np.int64]:
        full = (self._max_microbatches, *shape)
        array: NDArray[np.int64] = np.ndarray(full, np.int64, self._buffer, self._start + self._offset)
        self._offset += prod(full) * WORD_BYTES
        return array

    def put(self, batch: StepBatch) -> int:
        """Store a batch and return its number of micro-batches."""
        count = len(batch.microbatches)
        self._source_MB[:count] = 0 if batch.sources is None else batch.sources.source_MB
        bad = {sample.number: sample.reason for sample in batch.bad_samples}
        self._reasons.put(bad)
        # samples may be shorter than those for which the slot has room
        seq_len = batch.seq_len
        for number, one in enumerate(batch.microbatches):
            self._numbers_M4[number] = seq_len, one.squared_lengths, one.num_documents, batch.num_pictures
            self._sample_MB[number] = one.sample_B
            self._num_labels_MB[number] = one.num_labels_B
            self._is_bad_MB[number] = [sample in bad for sample in one.sample_B.tolist()]
            self._tokens_MSB[number, :seq_len] = one.tokens_SB
            self._labels_MSB[number, :seq_len] = one.labels_SB
            if self._document_MSB is not None and one.document_SB is not None:
                self._document_MSB[number, :seq_len] = one.document_SB
            self._has_picture_MB[number] = 0
            if one.patches_PKC is not None and one.picture_place_K is not None:
                self._has_picture_MB[number, one.picture_place_K] = 1
                self._patches_MU[number, : one.patches_PKC.size] = one.patches_PKC.ravel()
        return count

    def batch(
        self, count: int, plan: StepPlan, source_names: tuple[str, ...], *, has_patches: bool = True
    ) -> StepBatch:
        """Return the batch of `count` micro-batches that was stored. Its arrays of tokens are those of the slot.

        plan: of the step that was stored. source_names: the names of all sources. has_patches: see
        BatchReader.read_step.
        """
        num_labels_MB, source_MB = self._num_labels_MB[:count].copy(), self._source_MB[:count].copy()
        seq_len, _, _, num_pictures = self._numbers_M4[0].tolist()
        microbatches = [
            MicroBatch(
                tokens_SB=self._tokens_MSB[number, :seq_len],
                labels_SB=self._labels_MSB[number, :seq_len],
                document_SB=None if self._document_MSB is None else self._document_MSB[number, :seq_len],
                sample_B=self._sample_MB[number].copy(),
                num_labels_B=num_labels_MB[number],
                squared_lengths=int(self._numbers_M4[number, 1]),
                num_documents=int(self._numbers_M4[number, 2]),
            )
            for number in range(count)
        ]
        if has_patches:
            microbatches = [self._with_pictures(number, one) for number, one in enumerate(microbatches)]
        return StepBatch(
            plan.cursor,
            plan.global_batch_size,
            microbatches,
            SampleSources(source_names, source_MB, num_labels_MB) if len(source_names) > 1 else None,
            self._bad_samples(count),
            num_pictures=num_pictures,
        )

    def _with_pictures(self, number: int, micro: MicroBatch) -> MicroBatch:
        place_K = np.flatnonzero(self._has_picture_MB[number])
        if not len(place_K):
            return micro
        num_patches, patch_width = self._picture_shape
        shape = (num_patches, len(place_K), patch_width)
        patches_PKC = self._patches_MU[number, : prod(shape)].reshape(shape)
        return replace(micro, patches_PKC=patches_PKC, picture_place_K=place_K)

    def _bad_samples(self, count: int) -> tuple[BadSample, ...]:
        is_bad_MB = self._is_bad_MB[:count].astype(bool)
        if not is_bad_MB.any():
            return ()
        reasons = self._reasons.read()
        found = zip(
            self._sample_MB[:count][is_bad_MB].tolist(), self._source_MB[:count][is_bad_MB].tolist(), strict=True
        )
        return tuple(BadSample(number, source, reasons.get(number)) for number, source in found)

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


class Reasons:
    """Why samples of a step were replaced, in the bytes of a slot: as many whole reasons as fit. If a reason does not
    fit, the ranks still know the number of the sample, but the log lacks the address."""

    def __init__(self, content: memoryview) -> None:
        self._content = content

    def put(self, reason_of: Mapping[int, str | None]) -> None:
        """Store the reasons, by the number of the sample."""
        text = b""
        for number, reason in reason_of.items():
            line = json.dumps([number, reason]).encode() + b"\n"
            if len(text) + len(line) < len(self._content):
                text += line
        if self._content:
            self._content[: len(text) + 1] = text + b"\0"

    def read(self) -> dict[int, str | None]:
        """Return the stored reasons, by the number of the sample."""
        text, _, _ = bytes(self._content).partition(b"\0")
        return dict(json.loads(line) for line in text.splitlines())
