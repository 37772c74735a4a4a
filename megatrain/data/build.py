"""Build a data directory from text: shuffled token files with a held-out split, a tokenizer and meta.json.

Two passes, bounded memory. The first pass reads the sources once, in order, and spools their tokens to disk. The second
pass copies the documents in the order of a keyed hash of each document's identity. So random access goes to tokens on
disk, never to text, and works the same way for every source. In memory: a few blocks of text, and 32 bytes per
document. Whether a document is held out depends only on its identity and the fraction, so another seed or tokenizer
keeps the same held-out set.

A killed build leaves the tokenizer and the spool; the next one with the same inputs and options goes on from there, and
its files are those of a build that nothing interrupted.
"""

from __future__ import annotations

import hashlib
import heapq
import importlib.metadata
import json
import os
import shutil
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatrain.checkpoint_format.checkpoint_files import SENTENCEPIECE_NAME, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.whole_files import temporary_name
from megatrain.data.blocks import blocks
from megatrain.data.build_progress import BuildProgress
from megatrain.data.corpus import Corpus, CorpusDocument, open_corpus
from megatrain.data.end_of_document import tokenizer_config
from megatrain.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from megatrain.data.input_file import FileVersion
from megatrain.data.meta import META_NAME, DataMeta, SplitMeta
from megatrain.data.output import resumable_directory
from megatrain.data.spool import Spool
from megatrain.data.summary import entropy_nats, token_counts
from megatrain.data.tokenizer import (
    BYTES,
    Tokenizer,
    TokenizerSource,
    byte_tokenizer,
    load_tokenizer,
    read_tokenizer_file,
    train_tokenizer,
)
from megatrain.data.tokenizing import identity_hash, tokenized
from megatrain.formatting.quantities import count_text

TRAIN = "train"
VALIDATION = "validation"
FILE_NAMES = (
    *(f"{split}.{suffix}" for split in (TRAIN, VALIDATION) for suffix in ("bin", "idx")),
    TOKENIZER_NAME,
    SENTENCEPIECE_NAME,
    TOKENIZER_CONFIG_NAME,
    META_NAME,
)
"""All names that a data directory may have; its tokenizer has one of two."""
_TRAINING_SAMPLE_BYTES = 8_000_000
"""The text from which a tokenizer is trained: more text costs time and changes few merges of a small vocabulary."""
_BYTES_PER_WORKER = 8_000_000
"""A process starts within a fraction of a second, in which another one tokenizes a few megabytes."""
_LIBRARIES = ("tokenizers", "sentencepiece", "pyarrow")


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a build does with its inputs; the same inputs and options give the same files.

    The tokenizer comes from `tokenizer_path`, or is the one of bytes for the path `bytes`; `end` is its token that ends
    documents, "" finds it. Without a path, a byte-level BPE of `vocab_size` is trained on at most 8 MB of the training
    documents.
    """

    vocab_size: int = 4096
    tokenizer_path: Path | None = None
    end: str = ""
    text_key: str = "text"
    validation_fraction: float = 0.02
    seed: int = 1


def build(
    inputs: list[str],
    output: Path,
    options: BuildOptions | None = None,
    *,
    num_workers: int = 0,
    is_forced: bool = False,
    is_strict: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> DataMeta:
    """Build `output` from `inputs` and return its meta.json; `report` gets lines on each phase and its progress.

    num_workers: processes that tokenize; 0 means one per core, fewer for little text. is_strict: refuse folders with
    files that are not read.

    Raises: DataError when an input cannot be used, there are fewer than two documents, or `output` is taken.
    """
    options = options or BuildOptions()
    _check(options)
    corpus = open_corpus(inputs, options.text_key)
    if is_strict:
        corpus.check_complete()
    versions = [found.file.version() for found in corpus.files]
    digest = _digest(corpus, versions, options)
    with resumable_directory(output, FILE_NAMES, is_forced, digest) as (staging, kept):
        source, tokenizer = _tokenizer(corpus, options, kept, report)
        (staging / TOKENIZER_CONFIG_NAME).write_text(tokenizer_config(tokenizer.end), encoding="utf-8")
        shutil.copyfile(kept / tokenizer.file_name, staging / tokenizer.file_name)

        start_s = time.perf_counter()
        with Spool(kept) as spool:
            sizes = [version.num_bytes for version in versions]
            _fill(spool, corpus, sizes, source, options.seed, num_workers or _num_workers(sum(sizes)), report)
            _check_number(corpus, spool.progress.documents)
            report(f"tokenized: {spool.progress.documents} documents ({time.perf_counter() - start_s:.1f} s)")

            start_s = time.perf_counter()
            documents = spool.documents()
            tokens = spool.tokens(token_dtype(tokenizer.vocab_size))
            held_out = _held_out(documents["split_key"], options.validation_fraction)
            train = _write_split(tokens, documents, ~held_out, staging / TRAIN)
            validation = _write_split(tokens, documents, held_out, staging / VALIDATION)
        meta = DataMeta(
            sources=corpus.inputs,
            text_key=options.text_key,
            seed=options.seed,
            validation_fraction=options.validation_fraction,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            tokenizer_sha256=hashlib.sha256((staging / tokenizer.file_name).read_bytes()).hexdigest(),
            unigram_entropy_nats=entropy_nats(token_counts(IndexedDataset(staging / VALIDATION))),
            skipped=spool.progress.skipped,
            train=train,
            validation=validation,
        )
        (staging / META_NAME).write_text(meta.to_json(), encoding="utf-8")
        report(f"written: {train.tokens + validation.tokens} tokens ({time.perf_counter() - start_s:.1f} s)")
    return meta


def _check(options: BuildOptions) -> None:
    if not 0 < options.validation_fraction < 1:
        raise DataError(
            f"validation={options.validation_fraction} must be above 0 and below 1: a share of the documents"
        )
    if options.end and options.tokenizer_path is None:
        raise DataError(f"eod={options.end!r} names a token of an existing tokenizer; give its file with --tokenizer")


def _check_number(corpus: Corpus, num_documents: int) -> None:
    if num_documents < 2:
        raise DataError(
            f"{', '.join(corpus.inputs)}: {count_text(num_documents, 'document')} with text; at least two are "
            "needed, one to train on and one to hold out: give more files (a .txt longer than "
            "64 KiB counts as several documents)"
        )


def _digest(corpus: Corpus, versions: Sequence[FileVersion], options: BuildOptions) -> str:
    """Return a digest of everything that the files of a build depend on."""
    path = options.tokenizer_path
    content = b"" if path is None or str(path) == BYTES else read_tokenizer_file(path)
    values = {
        "inputs": corpus.inputs,
        "files": [
            (str(found.file), found.name, version.num_bytes, version.mark)
            for found, version in zip(corpus.files, versions, strict=True)
        ],
        "options": repr(options),
        "tokenizer": hashlib.sha256(content).hexdigest(),
        "libraries": [_version(library) for library in _LIBRARIES],
    }
    return hashlib.sha256(json.dumps(values).encode("utf-8", "surrogateescape")).hexdigest()


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _tokenizer(
    corpus: Corpus, options: BuildOptions, kept: Path, report: Callable[[str], None]
) -> tuple[TokenizerSource, Tokenizer]:
    """Return the tokenizer, and its source for other processes: the file in `kept`, where a killed build finds it."""
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
    return source, tokenizer


def _store(tokenizer: Tokenizer, path: Path) -> None:
    """Write a tokenizer's file at once: a killed build leaves a whole one or none."""
    temporary = path.with_name(temporary_name(path.name))
    tokenizer.save(temporary)
    temporary.replace(path)


def _num_workers(total_bytes: int) -> int:
    return min(len(os.sched_getaffinity(0)), 1 + total_bytes // _BYTES_PER_WORKER)


def _fill(
    spool: Spool,
    corpus: Corpus,
    file_sizes: Sequence[int],
    source: TokenizerSource,
    seed: int,
    num_workers: int,
    report: Callable[[str], None],
) -> None:
    """Tokenize what the spool does not hold yet."""
    before = spool.progress
    if before.is_complete:
        report(f"going on with a build that was stopped: all {count_text(before.documents, 'document')} are tokenized")
        return
    if before.documents:
        report(f"going on with a build that was stopped, after {count_text(before.documents, 'document')}")
    skipped = Counter(before.skipped)
    progress = BuildProgress(sum(file_sizes), before.file_bytes)
    for block, result in tokenized(blocks(corpus, file_sizes, skipped, before.place), source, seed, num_workers):
        spool.add(block, result)
        line = progress.after(block.file_bytes, block.text_bytes, result.num_tokens)
        if line is not None:
            report(line)
    spool.finish(skipped)


def _write_split(
    tokens: NDArray[np.generic], documents: NDArray[np.void], is_member: NDArray[np.bool_], prefix: Path
) -> SplitMeta:
    """Copy the member documents from the spool to token files at `prefix`, in shuffled order."""
    lengths = documents["tokens"]
    ends = np.cumsum(lengths)
    members = np.flatnonzero(is_member)
    members = members[np.argsort(documents["order_key"][members], kind="stable")]
    with IndexedWriter(prefix, tokens.dtype) as writer:
        for document in members:
            end = int(ends[document])
            writer.add_document(tokens[end - int(lengths[document]) : end])
    return SplitMeta(
        documents=len(members),
        tokens=int(lengths[members].sum()),
        text_bytes=int(documents["text_bytes"][members].sum()),
    )


def _training_sample(corpus: Corpus, validation_fraction: float) -> list[str]:
    """Return up to 8 MB of documents that will not be held out, in the order of the corpus.

    It keeps the documents with the largest split keys, because every fraction holds these out last.
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
    held_out = _held_out(np.frombuffer(split_keys, np.uint64), validation_fraction)
    return [document.text for _, position, document in sorted(kept, key=lambda item: item[1]) if not held_out[position]]


def _held_out(split_keys: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Return which documents are held out for validation: about `fraction` of them, at least one, and not all."""
    held_out = split_keys < np.uint64(fraction * 2.0**64)
    if len(split_keys) > 1:
        held_out[np.argmin(split_keys)] = True
        held_out[np.argmax(split_keys)] = False
    return np.asarray(held_out)
