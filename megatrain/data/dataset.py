"""Open token files for training, check before the first step that the data and its tokenizer match the model, and
identify the data by a digest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.checkpoint_format.checkpoint_names import SENTENCEPIECE_NAME, TOKENIZER_NAME, is_sentencepiece
from megatrain.contracts.errors import DataError
from megatrain.data.bad_tokens import BadTokensError
from megatrain.data.indexed import IndexedDataset
from megatrain.data.meta import META_NAME, DataMeta
from megatrain.data.remote_file import fetch_together
from megatrain.data.remote_path import AnyPath, DataPath
from megatrain.data.tokenizer import has_library_of, load_tokenizer, read_tokenizer_file

BLOCKS = 64
BLOCK_TOKENS = 16384
"""The blocks that are checked have a million tokens in total: BLOCKS * BLOCK_TOKENS."""
_INDEX_BLOCK = 4096
"""Elements of a block of the index in the digest: 16 KiB of sequence lengths, or 32 KiB of document bounds."""
_STRETCH_TOKENS = 256
_DIGITS = 32


def check_vocabulary(prefix: DataPath, meta: DataMeta | None, vocab_size: int) -> None:
    """Check that the tokens at `prefix`, with this meta.json, fit a model with `vocab_size` tokens.

    Raises: DataError when meta.json states a larger vocabulary.
    """
    if meta is not None and meta.vocab_size > vocab_size:
        raise DataError(
            f"{prefix.parent / META_NAME}: the data at {prefix} has a vocabulary of {meta.vocab_size}, more than "
            f"model.vocab_size={vocab_size}; set model.vocab_size={meta.vocab_size}, or build the data again with "
            f"--vocab-size {vocab_size}"
        )


def open_dataset(
    prefix: DataPath, vocab_size: int, *, replaces_bad_samples: bool = False
) -> tuple[IndexedDataset, str]:
    """Return the dataset at `prefix`, for a model with `vocab_size` tokens, and its digest (`data_digest`).

    The ids of the tokens that the digest reads, a million spread over the file, are checked here. The ids of each
    window are checked when it is read.
    replaces_bad_samples: bad samples are replaced later, so up to half of the stretches of 256 tokens may have a bad id
    here.

    Raises: DataError when the files are damaged, or a token id is too large.
    """
    dataset = IndexedDataset(prefix, vocab_size)
    length = _STRETCH_TOKENS if replaces_bad_samples else BLOCK_TOKENS
    sizes = [min(BLOCK_TOKENS, dataset.num_tokens - start) for start in block_starts(dataset.num_tokens).tolist()]
    num_stretches, num_bad = sum(math.ceil(size / length) for size in sizes), 0

    def check(start: int, tokens: NDArray[Any]) -> None:
        nonlocal num_bad
        for place in range(0, len(tokens), length):
            try:
                dataset.check_vocabulary(tokens[place : place + length], start + place)
            except BadTokensError:
                num_bad += 1
                # tokens of another vocabulary are bad everywhere; those of a damaged file are not
                if not replaces_bad_samples or 2 * num_bad > num_stretches:
                    raise

    return dataset, _digest(dataset, check)


def check_tokenizer(tokenizer: Path, prefix: DataPath, meta: DataMeta | None, vocab_size: int) -> None:
    """Check that the file `tokenizer` made the tokens at `prefix`, for a model with `vocab_size` tokens.

    Without a meta.json next to the tokens (`meta`), it is not checked that the tokenizer made them. Without the
    tokenizer's library, its number of tokens is not checked.

    Raises: DataError when the file is missing, is not a tokenizer, is another tokenizer, or has more tokens than
    the model.
    """
    content = read_tokenizer_file(tokenizer)
    if not (is_sentencepiece(tokenizer.name) or _is_tokenizer_json(content)):
        raise DataError(
            f"{tokenizer}: is not a tokenizer.json of the tokenizers library; set data.tokenizer to the file that the "
            f"tokens at {prefix} were made with"
        )
    if meta is not None and hashlib.sha256(content).hexdigest() != meta.tokenizer_sha256:
        raise DataError(
            f"{tokenizer}: is not the tokenizer that made the tokens at {prefix}: {prefix.parent / META_NAME} has "
            f"another SHA-256 ({meta.tokenizer_sha256[:12]}...); set data.tokenizer={tokenizer_beside(prefix)}, which "
            "the data were built with, or build them again with `megatrain data build --tokenizer`"
        )
    if not has_library_of(tokenizer):
        return
    num_tokens = load_tokenizer(tokenizer).vocab_size
    if num_tokens > vocab_size:
        raise DataError(
            f"{tokenizer}: has {num_tokens} tokens, more than model.vocab_size={vocab_size}; set "
            f"model.vocab_size={num_tokens}, or data.tokenizer to the file that the tokens at {prefix} were made with"
        )


def tokenizer_beside(prefix: AnyPath) -> AnyPath:
    """Return the path of the tokenizer in the data directory of a pair of token files."""
    model = prefix.parent / SENTENCEPIECE_NAME
    return model if model.exists() else prefix.parent / TOKENIZER_NAME


def tokenizer_digest(tokenizer: DataPath) -> str:
    """Return the SHA-256 of a tokenizer's file, as meta.json has it. Raises: DataError when it cannot be read."""
    return hashlib.sha256(read_tokenizer_file(tokenizer)).hexdigest()


def check_same_tokenizer(prefixes: Mapping[str, DataPath], metas: Mapping[str, DataMeta | None]) -> None:
    """Check that one tokenizer made all data sets (key -> prefix, meta.json). Those without meta.json are not checked.

    Raises: DataError naming two keys, their files and their tokenizers' digests. A loss on the tokens of another
    tokenizer would be meaningless.
    """
    first: tuple[str, DataPath, str] | None = None
    for key, prefix in prefixes.items():
        meta = metas[key]
        if meta is None:
            continue
        if first is None:
            first = key, prefix, meta.tokenizer_sha256
        elif meta.tokenizer_sha256 != first[2]:
            raise DataError(
                f"{key}={str(prefix)!r}: its tokens were made with another tokenizer (SHA-256 "
                f"{meta.tokenizer_sha256[:12]}...) than those of {first[0]}={str(first[1])!r} ({first[2][:12]}...), "
                f"according to the {META_NAME} next to each; build both with one tokenizer: `megatrain data build "
                f"--tokenizer {tokenizer_beside(first[1])}`"
            )


def _is_tokenizer_json(content: bytes) -> bool:
    """Return whether `content` has the form of a file of the tokenizers library: a JSON object with a model."""
    try:
        outline: Any = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(outline, dict) and isinstance(outline.get("model"), dict)


def block_starts(length: int, block: int = BLOCK_TOKENS) -> NDArray[np.int64]:
    """Return where the blocks of an array of this length start: at most BLOCKS of `block` elements."""
    return np.unique(np.linspace(0, max(length - block, 0), BLOCKS, dtype=np.int64))


def data_digest(dataset: IndexedDataset) -> str:
    """Return a digest, in hexadecimal, of the sizes and of blocks of index and tokens. Its cost is bounded at any size.

    The blocks are evenly spaced, from the start to the end. Data of at most BLOCKS blocks are read completely. In
    larger data, a change of documents or of their order changes the digest, unless it keeps every size and touches no
    block. Raises: BadTokensError when tokens cannot be read.
    """
    return _digest(dataset, lambda start, tokens: None)


def _digest(dataset: IndexedDataset, check: Callable[[int, NDArray[Any]], None]) -> str:
    """Return the digest. check: called with each block of tokens, and its position, before the next one is read."""
    starts = block_starts(dataset.num_tokens).tolist()
    fetch_together(block for start in starts for block in dataset.remote_blocks(start, BLOCK_TOKENS))
    sizes = (dataset.num_tokens, dataset.num_sequences, dataset.num_documents, dataset.dtype.str)
    digest = hashlib.sha256(repr(sizes).encode())
    for array in (dataset.sequence_lengths, dataset.document_bounds):
        for first in block_starts(len(array), _INDEX_BLOCK).tolist():
            digest.update(array[first : first + _INDEX_BLOCK].data)
    for start in starts:
        tokens = dataset.read_tokens(start, BLOCK_TOKENS)
        digest.update(tokens.data)
        check(start, tokens)
    return digest.hexdigest()[:_DIGITS]
