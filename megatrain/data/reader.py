"""Micro-batches of a step for one data-parallel rank, read directly from the memory-mapped tokens.

The step plan (contracts/step_plan.py) determines the samples of each micro-batch of a rank, and which micro-batches are
empty. A step's set of samples depends only on cursor and global batch size, so a run may resume with another dp_size
and see the same data. A mixture determines the source of each sample.
Legend: S sequence, B micro-batch. Arrays are sequence-first, int64. This package loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.contracts.labels import IGNORED_LABEL
from megatrain.contracts.step_plan import NO_SAMPLE, StepPlan
from megatrain.data.indexed import IndexedDataset
from megatrain.data.mixture import Mixture
from megatrain.data.order import PackedOrder, SampleOrder
from megatrain.data.sample_sources import SampleSources


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The input of one forward pass.

    labels_SB is the next token, or -100. document_SB numbers the documents within each window from 0, for attention
    that must not cross them; None when the run has no document mask. sample_B is the sample's number in the run, or
    NO_SAMPLE: an empty micro-batch fills a slot of the pipeline, and all its labels are -100.
    num_labels_B: how many labels of each sample have a loss.
    squared_lengths: the sum of the squared lengths of the stretches that attend to themselves: the documents, or the
    whole windows without a document mask. Source: OSDI'25 sec. 5.2: the compute time of a micro-batch follows this sum.
    num_documents: the number of these stretches, without the padding.
    """

    tokens_SB: NDArray[np.int64]
    labels_SB: NDArray[np.int64]
    document_SB: NDArray[np.int64] | None
    sample_B: NDArray[np.int64]
    num_labels_B: NDArray[np.int64]
    squared_lengths: int
    num_documents: int

    @property
    def num_label_tokens(self) -> int:
        return int(self.num_labels_B.sum())


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """One rank's micro-batches of a step.

    `num_label_tokens`, `squared_lengths` and `num_documents` are sums over the micro-batches. `sources`: the source of
    each sample; None for a run with one source.
    """

    cursor: int
    global_batch_size: int
    microbatches: list[MicroBatch]
    num_label_tokens: int
    squared_lengths: int = 0
    num_documents: int = 0
    sources: SampleSources | None = None


class TokenWindow(NamedTuple):
    """A stretch of a token stream: its first token, and how many labels it has. It spans one token more than labels."""

    dataset: IndexedDataset
    start: int
    num_labels: int


@dataclass(frozen=True, slots=True)
class TrainingSource:
    """Tokens that samples come from, and their order.

    section: the section of the configuration. max_epochs: how often each token may be read; 0: as often as needed.
    """

    identity: StreamSource
    dataset: IndexedDataset
    order: SampleOrder | PackedOrder
    section: str = ""
    max_epochs: float = 0.0


@dataclass(frozen=True, slots=True)
class BatchReader:
    """Reads any step of a run. It has no state: a first read of step 1,000 costs as much as a first read of step 0."""

    sources: tuple[TrainingSource | None, ...]
    """In the order of the mixture's sources; None: one that gets no samples any more."""
    mixture: Mixture
    has_document_mask: bool = False

    @classmethod
    def of_one(cls, dataset: IndexedDataset, order: SampleOrder, has_document_mask: bool = False) -> BatchReader:
        """Return the reader of one source."""
        mixture = Mixture(order.seed, (MixtureStage(0, (1,)),), 1)
        source = TrainingSource(StreamSource("", dataset.num_tokens), dataset, order)
        return cls((source,), mixture, has_document_mask)

    def following(self, stream: SampleStream) -> BatchReader:
        """Return the reader of another mixture of these sources, and of others that get no samples any more."""
        by_identity = {source.identity: source for source in self.sources if source is not None}
        return replace(self, sources=tuple(map(by_identity.get, stream.sources)), mixture=Mixture.of(stream))

    def read_step(self, plan: StepPlan, replica: int, *, has_tokens: bool = True) -> StepBatch:
        """Return one replica's part of a step.

        has_tokens=False: for a stage in the middle of a pipeline, which needs only the bounds of documents. Tokens are
        not read then, and are 0; their labels are -100. All other fields are the same.
        Raises: DataError when a token is outside the vocabulary.
        """
        slots = plan.slots(replica)
        sources, indices = self.mixture.places(np.array([number for slot in slots for number in slot], dtype=np.int64))
        samples = iter(self._samples(sources, indices))
        microbatches = [
            assemble(
                [next(samples) for _ in slot] or [()] * plan.micro_batch_size,
                np.array(slot or (NO_SAMPLE,) * plan.micro_batch_size, dtype=np.int64),
                self.seq_len,
                self.has_document_mask,
                has_tokens=has_tokens,
            )
            for slot in slots
        ]
        return StepBatch(
            plan.cursor,
            plan.global_batch_size,
            microbatches,
            sum(one.num_label_tokens for one in microbatches),
            sum(one.squared_lengths for one in microbatches),
            sum(one.num_documents for one in microbatches),
            self._sample_sources(sources, microbatches),
        )

    @property
    def seq_len(self) -> int:
        """The tokens of a sample, the same for all sources."""
        return next(source.order.seq_len for source in self.sources if source is not None)

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of all sources of the mixture, "" for a source that gets no more samples."""
        return tuple("" if source is None else source.identity.name for source in self.sources)

    def _sample_sources(self, sources: NDArray[np.int64], microbatches: Sequence[MicroBatch]) -> SampleSources | None:
        if len(self.sources) == 1:
            return None
        num_labels_MB = np.stack([microbatch.num_labels_B for microbatch in microbatches])
        # the empty micro-batches at the end have no labels, so their source does not matter
        source_MB = np.zeros(num_labels_MB.shape, dtype=np.int64)
        source_MB.reshape(-1)[: len(sources)] = sources
        return SampleSources(self.source_names, source_MB, num_labels_MB)

    def _samples(self, sources: NDArray[np.int64], indices: NDArray[np.int64]) -> list[list[TokenWindow]]:
        """Return the windows of each sample, by their places in the mixture."""
        samples: list[list[TokenWindow]] = [[] for _ in indices]
        for number in np.unique(sources).tolist():
            of_source = np.flatnonzero(sources == number)
            source = self._open(number)
            starts, labels, bounds = (part.tolist() for part in source.order.pieces(indices[of_source]))
            for place, first, end in zip(of_source.tolist(), bounds[:-1], bounds[1:], strict=True):
                samples[place] = [
                    TokenWindow(source.dataset, *piece)
                    for piece in zip(starts[first:end], labels[first:end], strict=True)
                ]
        return samples

    def _open(self, number: int) -> TrainingSource:
        source = self.sources[number]
        assert source is not None, "a source without weight got a sample"
        return source


def assemble(
    samples: Sequence[Sequence[TokenWindow]],
    samples_B: NDArray[np.int64],
    seq_len: int,
    has_document_mask: bool,
    *,
    has_tokens: bool = True,
) -> MicroBatch:
    """Return the micro-batch of these samples. The windows of a sample follow each other.

    A sample with fewer labels than `seq_len` is padded with token 0 and label -100. With `has_document_mask`, each
    window begins another document, as does the padding, and the last token of a document gets label -100 too, because
    it would have to predict the first token of an unrelated document. Without `has_tokens`, tokens are not read; see
    BatchReader.read_step.
    """
    shape = (seq_len, len(samples))
    tokens_SB, labels_SB = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
    document_SB = np.zeros(shape, dtype=np.int64) if has_document_mask else None
    num_labels_B = np.zeros(len(samples), dtype=np.int64)
    squared_lengths = 0 if has_document_mask else len(samples) * seq_len**2
    num_documents = 0 if has_document_mask else sum(map(bool, samples))
    for sample, windows in enumerate(samples):
        place, bounds = 0, [np.zeros(1, dtype=np.int64)]
        for dataset, start, count in windows:
            if count == 0:
                continue
            end = place + count
            if has_tokens:
                window = dataset.window(start, count + 1)
                tokens_SB[place:end, sample] = window[:-1]
                labels_SB[place:end, sample] = window[1:]
            num_labels_B[sample] += count
            if has_document_mask:
                firsts = dataset.document_starts_between(start + 1, start + count + 1) + (place - start)
                labels_SB[firsts - 1, sample] = IGNORED_LABEL
                # an empty document begins where the next one does
                num_labels_B[sample] -= np.count_nonzero(np.diff(firsts, prepend=place))
                bounds += [firsts, np.array([end])] if end < seq_len else [firsts]
            place = end
        unread = place if has_tokens else 0
        tokens_SB[unread:, sample] = 0
        labels_SB[unread:, sample] = IGNORED_LABEL
        if document_SB is not None:
            lengths = np.diff(np.concatenate((*bounds, [seq_len])))
            document_SB[:, sample] = np.repeat(np.arange(len(lengths)), lengths)
            squared_lengths += int(lengths @ lengths)
            num_documents += int(np.count_nonzero(lengths)) - (place < seq_len)
    return MicroBatch(
        tokens_SB=tokens_SB,
        labels_SB=labels_SB,
        document_SB=document_SB,
        sample_B=samples_B.copy(),
        num_labels_B=num_labels_B,
        squared_lengths=squared_lengths,
        num_documents=num_documents,
    )
