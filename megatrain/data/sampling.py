"""Choose tokens to display: documents at random, or the samples that training reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.data.indexed import IndexedDataset
from megatrain.data.order import SampleOrder

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TokenRange:
    """A range of the token stream. `number`: that of the document or sample; `start`: the first token's position."""

    number: int
    start: int
    num_tokens: int


def drawn_documents(dataset: IndexedDataset, count: int, seed: int) -> Iterator[TokenRange]:
    """Yield up to `count` different documents, drawn uniformly; the same seed draws the same documents."""
    generator = np.random.default_rng(seed & _WORD)
    count = min(count, dataset.num_documents)
    for number in generator.choice(dataset.num_documents, count, replace=False).tolist():
        start = dataset.document_start(number)
        yield TokenRange(number, start, dataset.document_start(number + 1) - start)


def training_samples(dataset: IndexedDataset, seq_len: int, seed: int, first: int, count: int) -> Iterator[TokenRange]:
    """Yield the `count` samples from number `first` on that training with this seq_len and data.seed reads.

    Raises: DataError when the stream is too short for windows of seq_len.
    """
    order = SampleOrder(dataset.num_tokens, seq_len, seed, str(dataset.prefix))
    numbers: NDArray[np.int64] = np.arange(first, first + count, dtype=np.int64)
    for number, start in zip(numbers.tolist(), order.window_starts(numbers).tolist(), strict=True):
        yield TokenRange(number, start, seq_len)
