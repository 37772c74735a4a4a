"""Open token files for training: check that the data and its tokenizer fit the model before a step is run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatrain.contracts.errors import DataError
from megatrain.data.indexed import IndexedDataset
from megatrain.data.meta import META_NAME, read_meta

_SAMPLED_BLOCKS = 64
_BLOCK_TOKENS = 16384


def open_dataset(prefix: Path, vocab_size: int) -> IndexedDataset:
    """Return the dataset at `prefix`, for a model with `vocab_size` tokens.

    A million tokens spread over the file are checked here, every window again when it is read.

    Raises: DataError when the files are damaged, meta.json states a larger vocabulary, or a token id is too large.
    """
    meta_path = prefix.parent / META_NAME
    meta = read_meta(meta_path)
    if meta is not None and meta.vocab_size > vocab_size:
        raise DataError(
            f"{meta_path}: the data at {prefix} has a vocabulary of {meta.vocab_size}, more than "
            f"model.vocab_size={vocab_size}; set model.vocab_size={meta.vocab_size}, or build the data again with "
            f"--vocab-size {vocab_size}"
        )
    dataset = IndexedDataset(prefix, vocab_size)
    last_block = max(dataset.num_tokens - _BLOCK_TOKENS, 0)
    for start in np.unique(np.linspace(0, last_block, _SAMPLED_BLOCKS, dtype=np.int64)):
        dataset.window(int(start), _BLOCK_TOKENS)
    return dataset
