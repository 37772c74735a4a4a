"""The batch of a step for one data-parallel rank, as it is read, passed from process to process and trained on.

Legend: M micro-batches of a rank, B micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.data.bad_tokens import BadSample
from megatrain.data.cache_use import CacheUse
from megatrain.data.loader_report import LoaderReport
from megatrain.data.microbatch import MicroBatch
from megatrain.data.producer_work import ProducerWorks


@dataclass(frozen=True, slots=True, eq=False)
class SampleSources:
    """The sources of one rank's samples of a step.

    names: the names of all sources of the mixture, "" for a source that gets no more samples. source_MB: the index in
    `names` of each sample's source. num_labels_MB: how many tokens of the sample have a loss. Shapes: [M, B].
    """

    names: tuple[str, ...]
    source_MB: NDArray[np.int64]
    num_labels_MB: NDArray[np.int64]

    def sums(self, losses_MB: NDArray[np.float64] | None) -> NDArray[np.float64]:
        """Return the summed loss of each source, and its number of tokens with a loss; zeros if `losses_MB` is None.

        Shapes: losses [M, B]; result [2, number of sources].
        """
        if losses_MB is None:
            return np.zeros((2, len(self.names)))
        sources = self.source_MB.ravel()
        weights = (losses_MB.ravel(), self.num_labels_MB.ravel())
        return np.stack([np.bincount(sources, weight, minlength=len(self.names)) for weight in weights])


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """One rank's micro-batches of a step.

    `sources`: the source of each sample; None for a run with one source. `bad_samples`: the samples that are replaced
    by ones without labels. `loader`: the report of the host's data loader; None if this rank has read the batch.
    `producers`: what each producer of pictures did for this batch, where it was read. `cache_use`: of the process that
    read it, up to then; None if no tokens are in object storage, or another rank of the host reports it.
    `num_pictures`: of the samples of all ranks.
    """

    cursor: int
    global_batch_size: int
    microbatches: list[MicroBatch]
    sources: SampleSources | None = None
    bad_samples: tuple[BadSample, ...] = ()
    loader: LoaderReport | None = None
    producers: ProducerWorks = ()
    cache_use: CacheUse | None = None
    num_pictures: int = 0

    @property
    def num_label_tokens(self) -> int:
        """How many labels of the micro-batches have a loss."""
        return sum(one.num_label_tokens for one in self.microbatches)

    @property
    def squared_lengths(self) -> int:
        """The sum over the micro-batches; see MicroBatch."""
        return sum(one.squared_lengths for one in self.microbatches)

    @property
    def num_documents(self) -> int:
        """The sum over the micro-batches; see MicroBatch."""
        return sum(one.num_documents for one in self.microbatches)

    @property
    def num_bytes(self) -> int:
        """The bytes of the tokens, labels, documents and patches."""
        return sum(
            array.nbytes
            for one in self.microbatches
            for array in (one.tokens_SB, one.labels_SB, one.document_SB, one.patches_PKC)
            if array is not None
        )

    @property
    def seq_len(self) -> int:
        """The tokens of a sample, the same for all samples of the step."""
        return len(self.microbatches[0].tokens_SB)

    @property
    def num_tokens(self) -> int:
        """The tokens of the step, over all ranks."""
        return self.global_batch_size * self.seq_len
