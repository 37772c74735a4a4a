"""Micro-batches of a step for one data-parallel rank, read directly from the token files.

The step plan (contracts/step_plan.py) determines the samples of each micro-batch of a rank, and which micro-batches are
empty. A step's set of samples depends only on cursor and global batch size, so a run may resume with another dp_size
and read the same data. With a cost, balance.py determines which of them form a micro-batch. A mixture determines the
source of each sample, and the source whether it has a picture: then it begins with the rows of its patches. A sample
that cannot be used may be replaced by one without labels, which changes no other sample.
Legend: S sequence, B micro-batch, K pictures of a micro-batch, P patches, C bytes of a patch. Arrays are
sequence-first, int64 (patches: uint8).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.config.model_products import DocumentCost
from megatrain.contracts.sample_ranges import position_after
from megatrain.contracts.step_plan import NO_SAMPLE, StepPlan
from megatrain.data.bad_tokens import BadSample, BadSampleError
from megatrain.data.balance import balanced_order
from megatrain.data.cache_use import CacheUse
from megatrain.data.microbatch import MicroBatch, OnBad, TokenWindow, assemble
from megatrain.data.mixture import Mixture
from megatrain.data.patches import pictures_of
from megatrain.data.producer_work import ProducerWorks
from megatrain.data.remote_file import RemoteBlock
from megatrain.data.step_batch import SampleSources, StepBatch
from megatrain.data.token_stream import SamplePieces, SourceOrder
from megatrain.data.training_source import TrainingSource


class ReadSlots(NamedTuple):
    """What a reader reads for some slots. sources_N: the source of each sample. producers: see StepBatch."""

    microbatches: list[MicroBatch]
    sources_N: NDArray[np.int64]
    bad_samples: tuple[BadSample, ...]
    producers: ProducerWorks


@dataclass(frozen=True, slots=True)
class BatchReader:
    """Reads any step of a run. It has no state: a first read of step 1,000 costs as much as a first read of step 0."""

    sources: tuple[TrainingSource | None, ...]
    """In the order of the mixture's sources; None: one that gets no samples any more."""
    mixture: Mixture
    has_document_mask: bool = False
    replaces_bad_samples: bool = False
    """Whether a sample that cannot be used is replaced by one without labels; otherwise it is an error."""
    balanced_cost: DocumentCost | None = None
    """The cost by which samples of a step are dealt. None: by the costs of the sources; without these, by number."""

    @classmethod
    def of(
        cls,
        sources: Sequence[TrainingSource | None],
        mixture: Mixture,
        has_document_mask: bool = False,
        replaces_bad_samples: bool = False,
        balanced_cost: DocumentCost | None = None,
    ) -> BatchReader:
        """Return the reader of sources whose samples have the lengths of the mixture's stages."""
        adapted = [
            source and replace(source, order=source.order.with_lengths(mixture.lengths_of(number)))
            for number, source in enumerate(sources)
        ]
        return cls(tuple(adapted), mixture, has_document_mask, replaces_bad_samples, balanced_cost)

    def following(self, stream: SampleStream) -> BatchReader:
        """Return the reader of another mixture of these sources, and of others that get no samples any more."""
        by_identity = {source.identity: source for source in self.sources if source is not None}
        return self.of(
            [by_identity.get(identity) for identity in stream.sources],
            Mixture.of(stream),
            self.has_document_mask,
            self.replaces_bad_samples,
            self.balanced_cost,
        )

    def read_step(
        self, plan: StepPlan, replica: int, *, has_tokens: bool = True, has_patches: bool = True
    ) -> StepBatch:
        """Return one replica's part of a step.

        has_tokens=False: for a stage in the middle of a pipeline, which needs only the bounds of documents. Tokens are
        not read then, and are 0; their labels are -100. All other fields are the same. has_patches=False: for a stage
        that does not encode pictures; their patches are left out.
        Raises: BadSampleError when the tokens or the picture of a sample cannot be used, unless such samples are
        replaced; DataError when a file of costs is damaged, storage refuses a read, or a producer refuses a request;
        UnreachableError when storage or all producers do not answer.
        """
        slots, seq_len = self.dealt(plan).slots(replica), self.seq_len_of(plan)
        microbatches, sources_N, bad_samples, producers = self.read_slots(
            slots, plan.micro_batch_size, seq_len, has_tokens=has_tokens, has_patches=has_patches
        )
        return StepBatch(
            plan.cursor,
            plan.global_batch_size,
            microbatches,
            self._sample_sources(sources_N, microbatches),
            bad_samples,
            producers=producers,
            cache_use=self.cache_use,
            num_pictures=self._num_pictures(plan),
        )

    def read_slots(
        self,
        slots: Sequence[tuple[int, ...]],
        micro_batch_size: int,
        seq_len: int,
        *,
        has_tokens: bool = True,
        has_patches: bool = True,
    ) -> ReadSlots:
        """Return the micro-batch of each slot, whose samples are given by number. See `read_step`.

        A slot with fewer samples than a micro-batch has is filled up with samples without labels.
        """
        numbers_N = np.array([number for slot in slots for number in slot], dtype=np.int64)
        sources_N, indices_N = self.mixture.places(numbers_N)
        bad: dict[int, str] = {}

        def on_bad(number: int, error: BadSampleError) -> None:
            if not self.replaces_bad_samples:
                raise error
            bad[number] = str(error)

        prepared = self._prepared(sources_N, indices_N)
        samples = prepared._samples(numbers_N, sources_N, indices_N, on_bad)
        first_rows = self._patches_of_sources[sources_N].tolist()
        of_sources = [None if source is None else source.pictures for source in prepared.sources]
        pictures = pictures_of(of_sources, sources_N, indices_N) if has_patches else {}
        # one array for all: the C library keeps its memory for the next step, and gives that of small ones back to the
        # kernel, whose zeroed pages then cost as much as all the rest of a read
        num_fields = 2 + self.has_document_mask
        fields_MFSB = np.empty((len(slots), num_fields, seq_len, micro_batch_size), dtype=np.int64)
        microbatches, first = [], 0
        for slot, fields_FSB in zip(slots, fields_MFSB, strict=True):
            own, num_missing = slice(first, first + len(slot)), micro_batch_size - len(slot)
            micro = assemble(
                [*samples[own], *[()] * num_missing],
                np.array([*slot, *[NO_SAMPLE] * num_missing], dtype=np.int64),
                seq_len,
                self.has_document_mask,
                on_bad,
                has_tokens=has_tokens,
                first_rows=[*first_rows[own], *[0] * num_missing],
                fields_FSB=fields_FSB,
            )
            pictured = [place for place in range(first, own.stop) if place in pictures]
            if pictured:
                patches_PKC = np.stack([pictures[place] for place in pictured], axis=1)
                micro = replace(micro, patches_PKC=patches_PKC, picture_place_K=np.array(pictured) - first)
            microbatches.append(micro)
            first = own.stop
        places = zip(numbers_N.tolist(), sources_N.tolist(), strict=True)
        return ReadSlots(
            microbatches,
            sources_N,
            tuple(BadSample(number, source, bad[number]) for number, source in places if number in bad),
            next((source.works for source in prepared.sources if source is not None and source.works), ()),
        )

    @property
    def cache_use(self) -> CacheUse | None:
        """What this process read through the cache of remote data; None: no tokens are in object storage."""
        uses = [source.dataset.cache_use for source in self.sources if source is not None]
        remote = [use for use in uses if use is not None]
        return CacheUse.sum(remote) if remote else None

    def remote_blocks(self, plan: StepPlan, replica: int) -> list[RemoteBlock]:
        """Return the blocks of remote files that `read_step` reads, in its order. Bad samples are left out."""
        numbers_N = np.array([number for slot in self.dealt(plan).slots(replica) for number in slot], dtype=np.int64)
        sources_N, indices_N = self.mixture.places(numbers_N)
        opened = enumerate(self.sources)
        remote = [number for number, source in opened if source and source.dataset.cache_use is not None]
        found = np.isin(sources_N, remote)
        windows = self._samples(numbers_N[found], sources_N[found], indices_N[found], lambda number, error: None)
        return [
            block
            for sample in windows
            for window in sample
            for block in window.dataset.remote_blocks(window.start, window.num_labels + 1)
        ]

    def dealt(self, plan: StepPlan) -> StepPlan:
        """Return the plan with the order in which this reader deals the samples of the step."""
        if self.balanced_cost is None and not any(self.cost_digests):
            return plan
        costs = self.costs(np.array(plan.samples, dtype=np.int64), self.balanced_cost)
        order = balanced_order(costs, plan.dealing, plan.micro_batch_size)
        return replace(plan, order=tuple(order.tolist()))

    def costs(self, samples: NDArray[np.int64], cost: DocumentCost | None) -> NDArray[np.int64]:
        """Return the cost of each of these samples by the costs of its source, or else by its documents and picture.

        Shapes: all [samples]. Raises: DataError when a file of costs or of packed samples is damaged.
        """
        sources, indices = self.mixture.places(samples)
        costs = np.zeros_like(samples)
        for number in np.unique(sources).tolist():
            of_source = sources == number
            source = self._open(number)
            costs[of_source] = source.sample_costs(cost, indices[of_source], has_document_mask=self.has_document_mask)
        return costs

    def seq_len_of(self, plan: StepPlan) -> int:
        """Return the tokens of a sample of a step, the same for all of them."""
        first, last = (position_after(plan.cursor, place, plan.skipped) for place in (0, plan.global_batch_size - 1))
        seq_len = self.mixture.seq_len(first)
        assert seq_len == self.mixture.seq_len(last), "the sample length changes inside a step"
        return seq_len

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of all sources of the mixture, "" for a source that gets no more samples."""
        return tuple("" if source is None else source.identity.name for source in self.sources)

    @property
    def cost_digests(self) -> tuple[str, ...]:
        """The digests of the costs of all sources of the mixture, "" for a source without costs."""
        return tuple("" if source is None or source.costs is None else source.costs.digest for source in self.sources)

    def _prepared(self, sources_N: NDArray[np.int64], indices_N: NDArray[np.int64]) -> BatchReader:
        """Return the reader whose sources have what these samples need. A source without samples is not asked."""
        sources = list(self.sources)
        for number in np.unique(sources_N).tolist():
            sources[number] = self._open(number).prepared(indices_N[sources_N == number])
        return replace(self, sources=tuple(sources))

    def _sample_sources(self, sources: NDArray[np.int64], microbatches: Sequence[MicroBatch]) -> SampleSources | None:
        if len(self.sources) == 1:
            return None
        num_labels_MB = np.stack([microbatch.num_labels_B for microbatch in microbatches])
        # the empty micro-batches at the end have no labels, so their source does not matter
        source_MB = np.zeros(num_labels_MB.shape, dtype=np.int64)
        source_MB.reshape(-1)[: len(sources)] = sources
        return SampleSources(self.source_names, source_MB, num_labels_MB)

    @property
    def _patches_of_sources(self) -> NDArray[np.int64]:
        """The number of patches of each sample of a source; 0 for a source without pictures. Shape: [sources]."""
        found = [0 if source is None else source.num_patches for source in self.sources]
        return np.array(found, dtype=np.int64)

    def _num_pictures(self, plan: StepPlan) -> int:
        """Return how many samples of a step have a picture."""
        has_pictures = self._patches_of_sources > 0
        if not has_pictures.any():
            return 0
        sources, _ = self.mixture.places(np.array(plan.samples, dtype=np.int64))
        return int(np.count_nonzero(has_pictures[sources]))

    def _samples(
        self, numbers_N: NDArray[np.int64], sources_N: NDArray[np.int64], indices_N: NDArray[np.int64], on_bad: OnBad
    ) -> list[list[TokenWindow]]:
        """Return the windows of each sample, in the order of the arguments. A bad sample has none."""
        samples: list[list[TokenWindow]] = [[] for _ in indices_N]
        for number in np.unique(sources_N).tolist():
            of_source = np.flatnonzero(sources_N == number)
            source = self._open(number)
            try:
                groups = [(of_source, source.order.pieces(indices_N[of_source]))]
            except BadSampleError:
                groups = list(_readable(source.order, of_source, numbers_N, indices_N, on_bad))
            for places, pieces in groups:
                starts, labels, bounds = (part.tolist() for part in pieces)
                for place, first, end in zip(places.tolist(), bounds[:-1], bounds[1:], strict=True):
                    samples[place] = [
                        TokenWindow(source.dataset, *piece)
                        for piece in zip(starts[first:end], labels[first:end], strict=True)
                    ]
        return samples

    def _open(self, number: int) -> TrainingSource:
        source = self.sources[number]
        assert source is not None, "a source without weight got a sample"
        return source


def _readable(
    order: SourceOrder,
    places: NDArray[np.int64],
    numbers_N: NDArray[np.int64],
    indices_N: NDArray[np.int64],
    on_bad: OnBad,
) -> Iterator[tuple[NDArray[np.int64], SamplePieces]]:
    """Yield each of `places` whose pieces can be read, with the pieces."""
    for place in places[:, None]:
        try:
            yield place, order.pieces(indices_N[place])
        except BadSampleError as error:
            on_bad(int(numbers_N[place[0]]), error)
