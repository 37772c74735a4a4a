"""A digest of a data set that costs the same at any size: of its sizes, and of blocks of its index and its tokens.

The blocks lie at equal distances, the first and the last at the ends. A set of at most BLOCKS blocks is read whole. In
a larger one, other documents, or another order of them, change the digest; a change that lies between all blocks and
keeps every size does not.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.data.indexed import IndexedDataset

BLOCKS = 64
BLOCK_TOKENS = 16384
"""A million tokens in all."""
_DIGITS = 32


def block_starts(length: int) -> NDArray[np.int64]:
    """Return where the blocks of an array of this length start: at most BLOCKS of BLOCK_TOKENS elements."""
    return np.unique(np.linspace(0, max(length - BLOCK_TOKENS, 0), BLOCKS, dtype=np.int64))


def data_digest(dataset: IndexedDataset) -> str:
    """Return the digest as hexadecimal digits."""
    digest = hashlib.sha256()
    sizes = (dataset.num_tokens, dataset.num_sequences, dataset.num_documents, dataset.dtype.str)
    digest.update(repr(sizes).encode())
    for array in (dataset.sequence_lengths, dataset.document_bounds, dataset.tokens):
        _add_blocks(digest, array)
    return digest.hexdigest()[:_DIGITS]


def _add_blocks(digest: hashlib._Hash, array: NDArray[Any]) -> None:
    for start in block_starts(len(array)):
        digest.update(array[start : start + BLOCK_TOKENS].tobytes())
