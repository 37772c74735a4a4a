"""The options of a build, and its tokenizer: existing, of bytes, or trained on the training documents."""

from __future__ import annotations

import heapq
import shutil
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatrain.checkpoint_format.checkpoint_names import TOKENIZER_NAME
from megatrain.contracts.files.whole_files import temporary_name
from megatrain.data.corpus import Corpus, CorpusDocument
from megatrain.data.tokenizer import (
    BYTES,
    Tokenizer,
    TokenizerSource,
    byte_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from megatrain.data.tokenizing import identity_hash

_TRAINING_SAMPLE_BYTES = 8_000_000
"""The text from which a tokenizer is trained: more text costs time and changes few merges of a small vocabulary."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The options of a build; the same inputs and options give the same files.

    The tokenizer comes from `tokenizer_path`; the path `bytes` means the tokenizer of bytes. `end` is the token that
    ends documents; if it is "", the token is looked up. Without a path, a byte-level BPE of `vocab_size` is trained on
    at most 8 MB of the training documents.
    """

    vocab_size: int = 4096
    tokenizer_path: Path | None = None
    end: str = ""
    text_key: str = "text"
    validation_fraction: float = 0.02
    seed: int = 1


def build_tokenizer(
    corpus: Corpus, options: BuildOptions, kept: Path, report: Callable[[str], None]
) -> tuple[TokenizerSource, Tokenizer]:
    """Return the source from which other processes load the tokenizer, and the tokenizer.

    The tokenizer's file is stored in `kept`, where a resumed build finds a trained one.
    """
    start_s = time.perf_counter()
    path = options.tokenizer_path
    if path is None:
        stored = kept / TOKENIZER_NAME
        if not stored.exists():
            sample = _training_sample(corpus, options.validation_fraction)
            _store(train_tokenizer(sample, options.vocab_size), stored)
        tokenizer = load_tokenizer(stored)
        source = TokenizerSource(stored, tokenizer.end)
    elif str(path) == BYTES:
        tokenizer = byte_tokenizer(options.end)
        _store(tokenizer, kept / tokenizer.file_name)
        source = TokenizerSource(None, tokenizer.end)
    else:
        tokenizer = load_tokenizer(path, options.end)
        shutil.copyfile(path, kept / tokenizer.file_name)
        source = TokenizerSource(kept / tokenizer.file_name, tokenizer.end)
    named = f", {tokenizer.end_source}" if path is not None else ""
    report(
        f"tokenizer: {tokenizer.vocab_size} tokens; {tokenizer.end} ({tokenizer.eod_id}{named}) ends documents "
        f"({time.perf_counter() - start_s:.1f} s)"
    )
    for note in tokenizer.notes:
        report(f"tokenizer: switched off: {note}")
    for loss in tokenizer.losses:
        report(f"tokenizer: WARNING: loses {loss}")
    return source, tokenizer


def _store(tokenizer: Tokenizer, path: Path) -> None:
    """Write a tokenizer's file atomically: a killed build leaves a complete file or none."""
    temporary = path.with_name(temporary_name(path.name))
    tokenizer.save(temporary)
    temporary.replace(path)


def _training_sample(corpus: Corpus, validation_fraction: float) -> list[str]:
    """Return up to 8 MB of documents that will not be held out, in the order of the corpus.

    The sample has the documents with the largest split keys, because these are the last to be held out at any fraction.
    """
    split_keys = array("Q")
    kept: list[tuple[int, int, CorpusDocument]] = []  # a heap: (split key, position in the corpus, document)
    num_bytes = 0
    for position, document in enumerate(corpus.documents()):
        split_keys.append(identity_hash(document))
        heapq.heappush(kept, (split_keys[-1], position, document))
        num_bytes += document.num_bytes
        while num_bytes > _TRAINING_SAMPLE_BYTES and len(kept) > 1:
            num_bytes -= heapq.heappop(kept)[2].num_bytes
    held_out = held_out_documents(np.frombuffer(split_keys, np.uint64), validation_fraction)
    return [document.text for _, position, document in sorted(kept, key=lambda item: item[1]) if not held_out[position]]


def held_out_documents(split_keys: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Return which documents are held out for validation: about `fraction` of all, but at least one, and not all."""
    held_out = split_keys < np.uint64(fraction * 2.0**64)
    if len(split_keys) > 1:
        held_out[np.argmin(split_keys)] = True
        held_out[np.argmax(split_keys)] = False
    return np.asarray(held_out)
