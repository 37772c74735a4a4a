"""Remove samples from a batch that has been read: they become samples without labels, as if they had been replaced when
they were read.

Legend: S sequence, M micro-batches of a rank, B micro-batch, K pictures of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.labels import IGNORED_LABEL
from megatrain.data.bad_tokens import BadSample
from megatrain.data.microbatch import MicroBatch
from megatrain.data.patches import Patches
from megatrain.data.step_batch import StepBatch


def without_samples(batch: StepBatch, numbers: Collection[int]) -> StepBatch:
    """Return a batch in which the samples with these numbers, and those replaced before, have no labels.

    The others keep their tokens. Samples of other ranks may be named, too.
    """
    before = {sample.number for sample in batch.bad_samples}
    removed = set(numbers) - before
    if not removed:
        return batch
    microbatches = [_without(micro, removed) for micro in batch.microbatches]
    num_labels_MB = np.stack([micro.num_labels_B for micro in microbatches])
    sources_MB = np.zeros_like(num_labels_MB) if batch.sources is None else batch.sources.source_MB
    found = [
        BadSample(number, source, None)
        for micro, sources_B in zip(microbatches, sources_MB.tolist(), strict=True)
        for number, source in zip(micro.sample_B.tolist(), sources_B, strict=True)
        if number in removed
    ]
    return replace(
        batch,
        microbatches=microbatches,
        sources=None if batch.sources is None else replace(batch.sources, num_labels_MB=num_labels_MB),
        bad_samples=(*batch.bad_samples, *found),
    )


def _without(micro: MicroBatch, numbers: Collection[int]) -> MicroBatch:
    is_removed_B = np.isin(micro.sample_B, list(numbers))
    if not is_removed_B.any():
        return micro
    seq_len = len(micro.tokens_SB)
    squared_lengths, num_documents = micro.squared_lengths, micro.num_documents
    document_SB = micro.document_SB
    if document_SB is None:
        num_documents -= int(np.count_nonzero(is_removed_B))
    else:
        for sample in np.flatnonzero(is_removed_B).tolist():
            lengths = np.bincount(document_SB[:, sample])
            squared_lengths += seq_len**2 - int(lengths @ lengths)
            # an empty document has a number and no token
            num_documents -= int(np.count_nonzero(lengths)) - _has_padding(micro, sample)
        document_SB = np.where(is_removed_B, 0, document_SB)
    return replace(
        micro,
        tokens_SB=np.where(is_removed_B, 0, micro.tokens_SB),
        labels_SB=np.where(is_removed_B, IGNORED_LABEL, micro.labels_SB),
        document_SB=document_SB,
        num_labels_B=np.where(is_removed_B, 0, micro.num_labels_B),
        squared_lengths=squared_lengths,
        num_documents=num_documents,
        patches_PKC=_without_patches(micro, is_removed_B),
    )


def _without_patches(micro: MicroBatch, is_removed_B: NDArray[np.bool_]) -> Patches | None:
    """Return the patches of a micro-batch, zeros for the pictures of samples that are removed."""
    if micro.patches_PKC is None or micro.picture_place_K is None:
        return None
    return np.where(is_removed_B[micro.picture_place_K, None], np.uint8(0), micro.patches_PKC)


def _has_padding(micro: MicroBatch, sample: int) -> bool:
    """Return whether a sample ends with padding. A last document that is one token 0 counts as padding."""
    assert micro.document_SB is not None
    is_last_S = micro.document_SB[:, sample] == micro.document_SB[-1, sample]
    labels_S, tokens_S = micro.labels_SB[is_last_S, sample], micro.tokens_SB[is_last_S, sample]
    return bool((labels_S == IGNORED_LABEL).all() and not tokens_S.any())
