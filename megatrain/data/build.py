"""Build a data directory from text: shuffled token files with a held-out split, tokenizer.json and meta.json.

Two passes, bounded memory. The first pass reads the sources once, in order, and spools their tokens to disk. The second
pass copies the documents in the order of a keyed hash of each document's identity. So random access goes to tokens on
disk, never to text, and works the same way for every source. In memory: one batch of text, and 36 bytes per document.
Whether a document is held out depends only on its identity and the fraction, so another seed or tokenizer keeps the
same held-out set.
"""

from __future__ import annotations

import hashlib
import heapq
import shutil
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.checkpoint_format.checkpoint_files import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from megatrain.contracts.errors import DataError
from megatrain.data.corpus import Corpus, CorpusDocument, open_corpus
from megatrain.data.end_of_document import tokenizer_config
from megatrain.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from megatrain.data.meta import META_NAME, DataMeta, SplitMeta
from megatrain.data.output import new_directory
from megatrain.data.summary import entropy_nats, token_counts
from megatrain.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from megatrain.formatting.quantities import count_text

TRAIN = "train"
VALIDATION = "validation"
FILE_NAMES = (
    *(f"{split}.{suffix}" for split in (TRAIN, VALIDATION) for suffix in ("bin", "idx")),
    TOKENIZER_NAME,
    TOKENIZER_CONFIG_NAME,
    META_NAME,
)
_TRAINING_SAMPLE_BYTES = 8_000_000
"""The text from which a tokenizer is trained: more text costs time and changes few merges of a small vocabulary."""
_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 4096


def build(
    inputs: list[str],
    output: Path,
    *,
    vocab_size: int = 4096,
    tokenizer_path: Path | None = None,
    end: str = "",
    text_key: str = "text",
    validation_fraction: float = 0.02,
    seed: int = 1,
    is_forced: bool = False,
    is_strict: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> DataMeta:
    """Build `output` from `inputs` and return its meta.json; `report` gets a line for each phase.

    The tokenizer comes from `tokenizer_path`; `end` is its token that ends documents, "" finds it. Without one, a
    byte-level BPE of `vocab_size` is trained on at most 8 MB of the training documents. `is_strict`: refuse folders
    with files that are not read.

    Raises: DataError when an input cannot be used, there are fewer than two documents, or `output` is taken.
    """
    if not 0 < validation_fraction < 1:
        raise DataError(f"validation={validation_fraction} must be above 0 and below 1: a share of the documents")
    if end and tokenizer_path is None:
        raise DataError(f"eod={end!r} names a token of an existing tokenizer; give its file with --tokenizer")
    corpus = open_corpus(inputs, text_key)
    if is_strict:
        corpus.check_complete()
    with new_directory(output, FILE_NAMES, is_forced) as staging:
        start_s = time.perf_counter()
        if tokenizer_path is None:
            tokenizer = train_tokenizer(_training_sample(corpus, validation_fraction), vocab_size)
            tokenizer.save(staging / TOKENIZER_NAME)
        else:
            tokenizer = load_tokenizer(tokenizer_path, end)
            shutil.copyfile(tokenizer_path, staging / TOKENIZER_NAME)
        (staging / TOKENIZER_CONFIG_NAME).write_text(tokenizer_config(tokenizer.end), encoding="utf-8")
        source = f", {tokenizer.end_source}" if tokenizer_path is not None else ""
        report(
            f"tokenizer: {tokenizer.vocab_size} tokens; {tokenizer.end} ({tokenizer.eod_id}{source}) ends documents "
            f"({time.perf_counter() - start_s:.1f} s)"
        )
        for note in tokenizer.notes:
            report(f"tokenizer: switched off: {note}")

        start_s = time.perf_counter()
        spool = _spool(corpus, tokenizer, seed, staging / "spool")
        report(f"tokenized: {len(spool.lengths)} documents ({time.perf_counter() - start_s:.1f} s)")

        start_s = time.perf_counter()
        held_out = _held_out(spool.split_keys, validation_fraction)
        train = _write_split(spool, ~held_out, staging / TRAIN)
        validation = _write_split(spool, held_out, staging / VALIDATION)
        spool.path.unlink()
        meta = DataMeta(
            sources=corpus.inputs,
            text_key=text_key,
            seed=seed,
            validation_fraction=validation_fraction,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            tokenizer_sha256=hashlib.sha256((staging / TOKENIZER_NAME).read_bytes()).hexdigest(),
            unigram_entropy_nats=entropy_nats(token_counts(IndexedDataset(staging / VALIDATION))),
            skipped=dict(spool.skipped),
            train=train,
            validation=validation,
        )
        (staging / META_NAME).write_text(meta.to_json(), encoding="utf-8")
        report(f"written: {train.tokens + validation.tokens} tokens ({time.perf_counter() - start_s:.1f} s)")
    return meta


@dataclass(frozen=True, slots=True)
class _Spool:
    """The tokens of all documents in the order of the corpus, on disk, and the properties of each document."""

    path: Path
    dtype: np.dtype[Any]
    lengths: NDArray[np.int64]
    text_bytes: NDArray[np.int64]
    order_keys: NDArray[np.uint64]
    split_keys: NDArray[np.uint64]
    skipped: Counter[str]


def _spool(corpus: Corpus, tokenizer: Tokenizer, seed: int, path: Path) -> _Spool:
    dtype = token_dtype(tokenizer.vocab_size)
    skipped: Counter[str] = Counter()
    lengths, text_bytes, order_keys, split_keys = array("q"), array("q"), array("Q"), array("Q")
    with path.open("wb") as file:
        for batch in _batches(corpus.documents(skipped)):
            for document, ids in zip(batch, tokenizer.encode_batch([document.text for document in batch]), strict=True):
                ids.append(tokenizer.eod_id)
                file.write(np.array(ids, dtype=dtype).tobytes())
                lengths.append(len(ids))
                text_bytes.append(document.num_bytes)
                order_keys.append(_hash(document, seed))
                split_keys.append(_hash(document))
    if len(lengths) < 2:
        raise DataError(
            f"{', '.join(corpus.inputs)}: {count_text(len(lengths), 'document')} with text; at least two are "
            "needed, one to train on and one to hold out: give more files (a .txt longer than "
            "64 KiB counts as several documents)"
        )
    return _Spool(
        path,
        dtype,
        np.frombuffer(lengths, np.int64),
        np.frombuffer(text_bytes, np.int64),
        np.frombuffer(order_keys, np.uint64),
        np.frombuffer(split_keys, np.uint64),
        skipped,
    )


def _write_split(spool: _Spool, is_member: NDArray[np.bool_], prefix: Path) -> SplitMeta:
    """Copy the member documents from the spool to token files at `prefix`, in shuffled order."""
    ends = np.cumsum(spool.lengths)
    tokens = np.memmap(spool.path, spool.dtype, mode="r").view(np.ndarray)
    members = np.flatnonzero(is_member)
    members = members[np.argsort(spool.order_keys[members], kind="stable")]
    with IndexedWriter(prefix, spool.dtype) as writer:
        for document in members:
            end = int(ends[document])
            writer.add_document(tokens[end - int(spool.lengths[document]) : end])
    return SplitMeta(
        documents=len(members),
        tokens=int(spool.lengths[members].sum()),
        text_bytes=int(spool.text_bytes[members].sum()),
    )


def _training_sample(corpus: Corpus, validation_fraction: float) -> list[str]:
    """Return up to 8 MB of documents that will not be held out, in the order of the corpus.

    It keeps the documents with the largest split keys, because every fraction holds these out last.
    """
    split_keys = array("Q")
    kept: list[tuple[int, int, CorpusDocument]] = []  # a heap: (split key, position in the corpus, document)
    num_bytes = 0
    for position, document in enumerate(corpus.documents()):
        split_keys.append(_hash(document))
        heapq.heappush(kept, (split_keys[-1], position, document))
        num_bytes += document.num_bytes
        while num_bytes > _TRAINING_SAMPLE_BYTES and len(kept) > 1:
            num_bytes -= heapq.heappop(kept)[2].num_bytes
    held_out = _held_out(np.frombuffer(split_keys, np.uint64), validation_fraction)
    return [document.text for _, position, document in sorted(kept, key=lambda item: item[1]) if not held_out[position]]


def _held_out(split_keys: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Return which documents are held out for validation: about `fraction` of them, at least one, and not all."""
    held_out = split_keys < np.uint64(fraction * 2.0**64)
    if len(split_keys) > 1:
        held_out[np.argmin(split_keys)] = True
        held_out[np.argmax(split_keys)] = False
    return np.asarray(held_out)


def _batches(documents: Iterator[CorpusDocument]) -> Iterator[list[CorpusDocument]]:
    batch: list[CorpusDocument] = []
    num_bytes = 0
    for document in documents:
        batch.append(document)
        num_bytes += document.num_bytes
        if num_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _hash(document: CorpusDocument, seed: int | None = None) -> int:
    """Return a 64-bit hash of the document's identity, keyed by `seed` if given."""
    identity = f"{document.name}\0{document.record}".encode("utf-8", "surrogateescape")
    key = b"" if seed is None else str(seed).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8, key=key).digest(), "little")
