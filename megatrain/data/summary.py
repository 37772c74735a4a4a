"""Facts about a token file that need a pass over it: how often each token occurs, and how long documents are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError
from megatrain.data.indexed import IndexedDataset, data_path

_BLOCK_TOKENS = 1 << 22
_MAX_TOKEN_IDS = 1 << 27
"""100 times the largest known vocabulary. The counts of this many ids take a gigabyte."""


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """What `megatrain data inspect` prints. Lengths are in tokens per document."""

    prefix: str
    dtype: str
    num_tokens: int
    num_sequences: int
    num_documents: int
    length_p50: int
    length_p90: int
    length_max: int
    num_distinct_tokens: int
    largest_token: int
    unigram_entropy_nats: float


def summarize(dataset: IndexedDataset) -> DatasetSummary:
    """Return the summary of the whole `dataset`. Raises: DataError as `token_counts`."""
    counts = token_counts(dataset)
    ends = np.append(dataset.sequence_pointers // dataset.dtype.itemsize, dataset.num_tokens)[dataset.document_bounds]
    lengths = np.diff(ends)
    p50, p90 = np.percentile(lengths, (50, 90), method="lower")
    return DatasetSummary(
        prefix=str(dataset.prefix),
        dtype=dataset.dtype.name,
        num_tokens=dataset.num_tokens,
        num_sequences=dataset.num_sequences,
        num_documents=dataset.num_documents,
        length_p50=int(p50),
        length_p90=int(p90),
        length_max=int(lengths.max()),
        num_distinct_tokens=int(np.count_nonzero(counts)),
        largest_token=len(counts) - 1,
        unigram_entropy_nats=entropy_nats(counts),
    )


def token_counts(dataset: IndexedDataset) -> NDArray[np.int64]:
    """Return how often each id from 0 to the largest occurs.

    Raises: DataError when tokens cannot be read, or an id is negative or larger than any vocabulary.
    """
    counts = np.zeros(1, dtype=np.int64)
    for start in range(0, dataset.num_tokens, _BLOCK_TOKENS):
        tokens = dataset.window(start, _BLOCK_TOKENS)
        if tokens.min() < 0:
            raise DataError(f"{data_path(dataset.prefix)}: holds the token id {int(tokens.min())}; ids start at 0")
        if tokens.max() >= _MAX_TOKEN_IDS:
            raise DataError(
                f"{data_path(dataset.prefix)}: holds the token id {int(tokens.max())}, larger than any vocabulary; the "
                f"file is damaged or its index names another id type than {dataset.dtype.name}"
            )
        block = np.bincount(tokens, minlength=len(counts))
        block[: len(counts)] += counts
        counts = block
    return counts


def entropy_nats(counts: NDArray[np.int64]) -> float:
    """Return the entropy of the distribution that `counts` describe, in nats."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
