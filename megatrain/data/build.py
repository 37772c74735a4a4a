"""Build a data directory from text: shuffled token files with a held-out split, a tokenizer and meta.json.

A build has two passes and needs bounded memory. The first pass reads the sources in order, and spools their tokens to
disk. The second pass copies the documents in the order of a keyed hash of each document's identity. So random access
reads tokens on disk, never text, and works the same way for every source. Memory use: a few blocks of text, and 32
bytes per document. A build that trains a tokenizer reads the sources once more, before the first pass.
Which documents are held out depends only on their identities and the fraction, so another seed or tokenizer keeps the
same held-out set.

A killed build leaves the tokenizer and the spool. The next build with the same inputs and options continues from there,
and writes the same files as an uninterrupted build.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatrain.checkpoint_format.checkpoint_names import SENTENCEPIECE_NAME, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.new_directory import DirectoryKind, resumable_directory
from megatrain.data.blocks import DocumentBlock, blocks
from megatrain.data.build_tokenizer import BuildOptions, build_tokenizer, held_out_documents
from megatrain.data.corpus import Corpus, open_corpus
from megatrain.data.end_of_document import tokenizer_config
from megatrain.data.indexed import IndexedDataset, token_dtype
from megatrain.data.indexed_writer import IndexedWriter
from megatrain.data.input_file import FileVersion
from megatrain.data.meta import META_NAME, DataMeta, SplitMeta
from megatrain.data.spool import TokenSpool
from megatrain.data.summary import entropy_nats, token_counts
from megatrain.data.tokenizer import BYTES, read_tokenizer_file
from megatrain.data.tokenizing import TokenizedBlock, default_workers, tokenized
from megatrain.formatting import bytes_text, count_text, seconds_text

TRAIN = "train"
VALIDATION = "validation"
FILE_NAMES = (
    *(f"{split}.{suffix}" for split in (TRAIN, VALIDATION) for suffix in ("bin", "idx")),
    TOKENIZER_NAME,
    SENTENCEPIECE_NAME,
    TOKENIZER_CONFIG_NAME,
    META_NAME,
)
"""All file names that a data directory may contain; it has a tokenizer.json or a tokenizer.model, not both."""
DATA_DIRECTORY = DirectoryKind(
    FILE_NAMES.__contains__, "a data set", "a data build", "choose another --output", DataError, DataError
)
_LIBRARIES = ("tokenizers", "sentencepiece", "pyarrow")
_PROGRESS_INTERVAL_S = 5.0


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

    num_workers: threads or processes that tokenize; 0 means one per core, fewer for little text. is_strict: refuse
    folders that contain files of unknown kinds.

    Raises: DataError when an input, an option or the tokenizer cannot be used, there are fewer than two documents, or
    `output` exists and must not be replaced; MegatrainError when a process that tokenizes ends, or it or a thread
    cannot be started.
    """
    options = options or BuildOptions()
    _check(options)
    corpus = open_corpus(inputs, options.text_key)
    if is_strict:
        corpus.check_complete()
    versions = [found.file.version() for found in corpus.files]
    digest = _digest(corpus, versions, options)
    # `staging` becomes the output; `kept` is left for the next build if this one is killed
    with resumable_directory(output, DATA_DIRECTORY, is_forced, digest) as (staging, kept):
        source, tokenizer = build_tokenizer(corpus, options, kept, report)
        (staging / TOKENIZER_CONFIG_NAME).write_text(tokenizer_config(tokenizer.end), encoding="utf-8")
        shutil.copyfile(kept / tokenizer.file_name, staging / tokenizer.file_name)

        start_s = time.perf_counter()
        with TokenSpool(kept) as spool:
            sizes = [version.num_bytes for version in versions]
            workers = num_workers or default_workers(sum(sizes), len(os.sched_getaffinity(0)), tokenizer)
            tokenize = partial(tokenized, tokenizer=tokenizer, source=source, seed=options.seed, num_workers=workers)
            _fill(spool, corpus, sizes, tokenize, report)
            _check_number(corpus, spool.progress.documents)
            report(f"tokenized: {spool.progress.documents} documents ({time.perf_counter() - start_s:.1f} s)")

            start_s = time.perf_counter()
            documents = spool.documents()
            tokens = spool.tokens(token_dtype(tokenizer.vocab_size))
            held_out = held_out_documents(documents["split_key"], options.validation_fraction)
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


def _fill(
    spool: TokenSpool,
    corpus: Corpus,
    file_sizes: Sequence[int],
    tokenize: Callable[[Iterable[DocumentBlock]], Generator[tuple[DocumentBlock, TokenizedBlock]]],
    report: Callable[[str], None],
) -> None:
    """Tokenize the documents that are not in the spool yet."""
    before = spool.progress
    if before.is_complete:
        report(f"continuing a build that was stopped: all {count_text(before.documents, 'document')} are tokenized")
        return
    if before.documents:
        report(f"continuing a build that was stopped, after {count_text(before.documents, 'document')}")
    skipped = Counter(before.skipped)
    progress = BuildProgress(sum(file_sizes), before.file_bytes)
    with closing(tokenize(blocks(corpus, file_sizes, skipped, before.place))) as results:
        for block, result in results:
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
        bin_sha256=writer.bin_sha256,
        idx_sha256=writer.idx_sha256,
    )


class BuildProgress:
    """The progress, the rate and the remaining time of the first pass of a build.

    The rate is measured from the construction on. The work of an earlier, killed build counts as progress, but not for
    the rate.
    """

    def __init__(self, total_bytes: int, done_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Both numbers count bytes of the corpus's files as stored; an earlier build has read `done_bytes` of them."""
        self._total_bytes = total_bytes
        self._first_bytes = done_bytes
        self._clock = clock
        self._start_s = self._last_s = clock()
        self._text_bytes = 0
        self._num_tokens = 0

    def after(self, file_bytes: int, text_bytes: int, num_tokens: int) -> str | None:
        """Count a block; return a line for the log if the last line is at least _PROGRESS_INTERVAL_S old, else None.

        file_bytes: bytes of files read so far, in all. text_bytes, num_tokens: the size of the block.
        """
        self._text_bytes += text_bytes
        self._num_tokens += num_tokens
        now_s = self._clock()
        if now_s - self._last_s < _PROGRESS_INTERVAL_S:
            return None
        self._last_s = now_s
        passed_s = now_s - self._start_s
        line = (
            f"tokenizing: {bytes_text(file_bytes)} of {bytes_text(self._total_bytes)} "
            f"({_share(file_bytes, self._total_bytes):.0f} %), {bytes_text(round(self._text_bytes / passed_s))}/s of "
            f"text, {self._num_tokens / passed_s:,.0f} tokens/s"
        )
        new_bytes = file_bytes - self._first_bytes
        if new_bytes <= 0:
            return line
        left_s = max(0, self._total_bytes - file_bytes) * passed_s / new_bytes
        return f"{line}, {seconds_text(left_s)} left"


def _share(part: int, whole: int) -> float:
    return 100 * min(1.0, part / whole) if whole else 100.0
