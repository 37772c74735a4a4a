"""The batch of a step for one data-parallel rank, as it is read, passed from process to process and trained on."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.data.bad_tokens import BadSample
from megatrain.data.cache_use import CacheUse
from megatrain.data.loader_report import LoaderReport
from megatrain.data.microbatch import MicroBatch
from megatrain.data.producer_work import ProducerWorks
from megatrain.data.sample_sources import SampleSources


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """One rank's micro-batches of a step.

    `sources`: the source of each sample; None for a run with one source. `bad_samples`: the samples that are replaced
    by ones without labels. `loader`: of the data loader of the host; None if this rank has read the batch.
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
