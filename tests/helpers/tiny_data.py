"""Small token files with a pattern to learn, without any text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatrain.data.indexed import token_dtype
from megatrain.data.indexed_writer import IndexedWriter

_LONGEST_DOCUMENT = 60
"""With windows of 16 tokens, some hold one document and some hold several."""


def write_corpus(prefix: Path, num_tokens: int, vocab_size: int, seed: int = 0) -> Path:
    """Write `num_tokens` tokens in documents of uneven length and return the prefix of the files.

    A token is determined by the previous one in three cases of four, so a model's loss can fall.
    """
    generator = np.random.default_rng(seed)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(prefix, token_dtype(vocab_size)) as writer:
        while num_tokens > 0:
            length = min(int(generator.integers(1, _LONGEST_DOCUMENT)), num_tokens)
            writer.add_document(_document(generator, length, vocab_size))
            num_tokens -= length
    return prefix


def _document(generator: np.random.Generator, length: int, vocab_size: int) -> NDArray[np.int64]:
    tokens = generator.integers(0, vocab_size, length)
    is_follower = generator.random(length) < 0.75
    for position in range(1, length):
        if is_follower[position]:
            tokens[position] = (3 * tokens[position - 1] + 7) % vocab_size
    return tokens
