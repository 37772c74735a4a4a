"""Hosts of a data loader: their plans over a small corpus, and batches of a single reader for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.config.batch import BatchConfig, BatchSchedule, BatchStage
from megatrain.config.data import DataConfig
from megatrain.config.step_sequence import StepSequence
from megatrain.contracts.layout import Layout
from megatrain.contracts.step_plan import Dealing, StepPlan
from megatrain.data.block_cache import CacheSettings
from megatrain.data.dataset import data_digest
from megatrain.data.indexed import IndexedDataset
from megatrain.data.loader.decision import Fill
from megatrain.data.loader.plan import LoaderPlan, loader_plan
from megatrain.data.loader.process import RingFiller
from megatrain.data.loader.ring import Ring
from megatrain.data.loader.ring_layout import RingLayout
from megatrain.data.microbatch import MicroBatch
from megatrain.data.order import SampleOrder
from megatrain.data.reader import BatchReader
from megatrain.data.remote_path import DataPath, path_or_url
from megatrain.data.step_batch import StepBatch
from tests.helpers.one_source import reader_of_one, stream_of_one
from tests.helpers.tiny_data import write_corpus

VOCAB_SIZE = 90
SEQ_LEN = 16
NUM_TOKENS = 4000


class CountedDataset(IndexedDataset):
    """Token files that count the tokens that are read."""

    num_read = 0

    def window(self, start: int, length: int) -> NDArray[Any]:
        self.num_read += length
        return super().window(start, length)


@dataclass(frozen=True)
class Corpus:
    """Token files, and the stream of their samples."""

    dataset: CountedDataset
    stream: SampleStream
    has_document_mask: bool
    cache_directory: str = ""

    @property
    def reader(self) -> BatchReader:
        order = SampleOrder(self.dataset.num_tokens, SEQ_LEN, self.stream.seed)
        alone = reader_of_one(self.dataset, order, self.has_document_mask)
        (source,) = alone.sources
        assert source is not None
        identity = self.stream.sources[0]
        return BatchReader((type(source)(identity, self.dataset, order),), alone.mixture, self.has_document_mask)

    def plan(self, layout: Layout, ranks: Sequence[int], steps: StepSequence, prefetch: int = 1) -> LoaderPlan:
        """Return the plan of the host with these ranks."""
        return loader_plan(self.reader, self.stream, steps, layout, ranks, self._data(prefetch))

    def _data(self, prefetch: int) -> DataConfig:
        return DataConfig(prefetch=prefetch, cache_directory=self.cache_directory)


def corpus(
    root: Path, *, has_document_mask: bool = True, vocab_size: int = VOCAB_SIZE, is_remote: bool = False
) -> Corpus:
    """Write a corpus with ids below VOCAB_SIZE, which is checked against `vocab_size` when it is read.

    is_remote: it is read through a URL, and a cache in `root`.
    """
    prefix: DataPath = write_corpus(root / "train", NUM_TOKENS, VOCAB_SIZE, seed=1)
    cache = DataConfig(cache_directory=str(root) if is_remote else "")
    if is_remote:
        prefix = path_or_url(f"file://{prefix}", CacheSettings.of(cache))
    dataset = CountedDataset(prefix, vocab_size)
    stream = stream_of_one(dataset.num_tokens, 7, "web", data_digest(dataset), seq_len=SEQ_LEN)
    return Corpus(dataset, stream, has_document_mask, cache.cache_directory)


def steps(layout: Layout, num_steps: int, cursor: int = 0, *, least_slots: int = 1) -> StepSequence:
    """Return steps without samples 9 and 10 whose batch grows from 4 to 12 within the first 24 samples; 20 from sample
    36 on."""
    batch = BatchConfig(micro_batch_size=2, global_batch_size=12, rampup_start=4, rampup_increment=4, rampup_samples=24)
    dealing = Dealing(6, layout.num_sample_parts, least_slots)
    return StepSequence(BatchSchedule(batch, (BatchStage(36, 20),)), dealing, cursor, num_steps, ((9, 11),))


def read_alone(reader: BatchReader, steps: StepSequence, layout: Layout, rank: int) -> Iterator[StepBatch]:
    """Yield the batches of a rank that reads them by itself."""
    replica, _ = layout.sample_share(rank)
    for plan in steps.plans():
        yield reader.read_step(plan, replica)


def new_ring(plan: LoaderPlan, open_reader: Callable[[], BatchReader] | None = None) -> tuple[Ring, RingFiller]:
    """Return an empty ring in the memory of this process, and a loader that fills it."""
    layout = RingLayout.of(plan)
    ring = Ring(bytearray(layout.num_bytes), layout)
    return ring, RingFiller(plan, ring, open_reader or plan.open_reader)


def filled_steps(plan: LoaderPlan, ring: Ring, loader: RingFiller) -> Iterator[tuple[int, StepPlan]]:
    """Yield each step when the ranks are done with the steps before it and the loader has filled the ring."""
    for step, step_plan in enumerate(plan.steps.plans()):
        for reader in range(plan.num_readers):
            ring.set_done(reader, step)
        while isinstance(due := loader.next(), Fill):
            loader.fill(due)
        yield step, step_plan


def content(batch: StepBatch, *, has_tokens: bool = True) -> tuple[Any, ...]:
    """Return a copy of everything in a batch, for comparison."""
    sources = None if batch.sources is None else (batch.sources.names, batch.sources.source_MB.tolist())
    sums = (batch.num_label_tokens, batch.squared_lengths, batch.num_documents, batch.num_pictures)
    micros = [_micro(one, has_tokens=has_tokens) for one in batch.microbatches]
    bad = [(sample.number, sample.source, sample.reason) for sample in batch.bad_samples]
    return batch.cursor, batch.global_batch_size, sums, sources, micros, bad


def _micro(one: MicroBatch, *, has_tokens: bool) -> tuple[Any, ...]:
    arrays = [one.sample_B, one.num_labels_B, *([] if one.document_SB is None else [one.document_SB])]
    if has_tokens:
        arrays += [one.tokens_SB, one.labels_SB]
    assert all(array.dtype == np.int64 for array in arrays)
    patches = None if one.patches_PKC is None else (one.patches_PKC.shape, one.patches_PKC.tobytes())
    places = None if one.picture_place_K is None else one.picture_place_K.tolist()
    return (
        one.squared_lengths,
        one.num_documents,
        one.num_label_tokens,
        [array.tolist() for array in arrays],
        patches,
        places,
    )
