"""Sample orders over one source: the stream as checkpoints record it, and a reader of its batches."""

from __future__ import annotations

from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.config.model_products import DocumentCost
from megatrain.data.indexed import IndexedDataset
from megatrain.data.mixture import Mixture
from megatrain.data.order import SampleOrder
from megatrain.data.reader import BatchReader
from megatrain.data.training_source import TrainingSource

SEQ_LEN = 16


def stream_of_one(
    num_tokens: int, seed: int, name: str = "", digest: str = "", *, seq_len: int = SEQ_LEN
) -> SampleStream:
    return SampleStream(seed, (StreamSource(name, num_tokens, digest),), (MixtureStage(0, (1,), seq_len),))


def reader_of_one(
    dataset: IndexedDataset,
    order: SampleOrder,
    has_document_mask: bool = False,
    balanced_cost: DocumentCost | None = None,
) -> BatchReader:
    mixture = Mixture(order.seed, (MixtureStage(0, (1,), order.seq_len),), 1)
    source = TrainingSource(StreamSource("", dataset.num_tokens), dataset, order)
    return BatchReader((source,), mixture, has_document_mask, balanced_cost=balanced_cost)
