"""Read token files completely, and report every difference from what was built, with the file and the byte."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatrain.contracts.errors import DataError
from megatrain.data.bad_tokens import BadTokensError
from megatrain.data.bins import PackedBins, first_difference
from megatrain.data.costs import DocumentCosts, costs_path
from megatrain.data.dataset import tokenizer_beside, tokenizer_digest
from megatrain.data.indexed import IndexedDataset, data_path, index_path
from megatrain.data.meta import META_NAME, DataMeta, SplitMeta, read_meta
from megatrain.data.remote_path import DataPath, matching

_BLOCK_TOKENS = 1 << 22
_BLOCK_DOCUMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class DataProblem:
    """A difference. `offset`: the first wrong byte of `file`, None if it concerns the whole file."""

    file: str
    offset: int | None
    text: str

    def __str__(self) -> str:
        place = "" if self.offset is None else f" at byte {self.offset}"
        return f"{self.file}{place}: {self.text}"


@dataclass(frozen=True, slots=True)
class VerifiedPair:
    """One pair of token files and its problems. The counts are 0 if the files cannot be opened."""

    prefix: str
    documents: int
    tokens: int
    problems: tuple[DataProblem, ...]


def verify_data(path: DataPath, vocab_size: int | None = None) -> list[VerifiedPair]:
    """Verify a data directory, or the pair with the prefix `path`.

    The pairs `train` and `validation` are compared with a meta.json beside them, if there is one. Token ids must be
    below `vocab_size`; if that is None, below the vocabulary size in meta.json. Without both, ids must only be at least
    0.
    Raises: DataError when there is nothing to verify, or meta.json is damaged.
    """
    if not path.is_dir():
        meta = read_meta(path.parent / META_NAME)
        return [_verify_pair(path, meta, _split(meta, path.name), vocab_size)]
    meta = read_meta(path / META_NAME)
    prefixes: list[DataPath] = [index.parent / index.name.removesuffix(".idx") for index in matching(path, "*.idx")]
    if meta is not None:
        prefixes = [path / name for name in ("train", "validation")]
    if not prefixes:
        raise DataError(f"{path}: holds no .bin/.idx pair; give a data directory or the prefix of a pair")
    return [_verify_pair(prefix, meta, _split(meta, prefix.name), vocab_size) for prefix in prefixes]


def _split(meta: DataMeta | None, name: str) -> SplitMeta | None:
    return None if meta is None else {"train": meta.train, "validation": meta.validation}.get(name)


def _verify_pair(
    prefix: DataPath, meta: DataMeta | None, split: SplitMeta | None, vocab_size: int | None
) -> VerifiedPair:
    problems: list[DataProblem] = []
    if meta is not None and split is not None:
        problems += _tokenizer_problems(prefix, meta)
        problems += _digest_problems(prefix, split)
    try:
        dataset = IndexedDataset(prefix)
    except DataError as error:
        return VerifiedPair(str(prefix), 0, 0, (*problems, _as_problem(error, data_path(prefix), index_path(prefix))))
    if split is not None and (dataset.num_documents, dataset.num_tokens) != (split.documents, split.tokens):
        problems.append(
            DataProblem(
                str(index_path(prefix)),
                None,
                f"lists {dataset.num_documents} documents and {dataset.num_tokens} tokens, and {META_NAME} has "
                f"{split.documents} and {split.tokens}; build the data again",
            )
        )
    counts = (dataset.num_documents, dataset.num_tokens)
    try:
        problems += _vocabulary_problems(dataset, vocab_size or (meta.vocab_size if meta is not None else None))
    except BadTokensError as error:
        # the checks below would fail at the same bytes
        unreadable = DataProblem(error.tokens.file, error.tokens.offset, error.tokens.reason)
        return VerifiedPair(str(prefix), *counts, (*problems, unreadable))
    if meta is not None and split is not None:
        problems += _end_problems(dataset, meta.eod_id)
    problems += _packing_problems(dataset)
    problems += _costs_problems(dataset)
    return VerifiedPair(str(prefix), *counts, tuple(problems))


def _packing_problems(dataset: IndexedDataset) -> Iterator[DataProblem]:
    """Yield what is wrong with the packed samples beside the token files."""
    for path in matching(dataset.prefix.parent, f"{glob.escape(dataset.prefix.name)}.bins-*"):
        seq_len = path.name.rpartition("-")[2]
        if not seq_len.isdecimal():
            continue
        try:
            offset = first_difference(dataset, PackedBins(dataset, int(seq_len)))
        except DataError as error:
            yield _as_problem(error, path)
            continue
        if offset is not None:
            again = f"`megatrain data pack {dataset.prefix} --seq-len {seq_len} --force`"
            yield DataProblem(
                str(path), offset, f"differs from what packing makes of the documents; make it again: {again}"
            )


def _costs_problems(dataset: IndexedDataset) -> Iterator[DataProblem]:
    """Yield what is wrong with the costs beside the token files."""
    path = costs_path(dataset.prefix)
    if not path.exists():
        return
    try:
        DocumentCosts(dataset).read(0, dataset.num_documents)
    except DataError as error:
        yield _as_problem(error, path)


def _tokenizer_problems(prefix: DataPath, meta: DataMeta) -> Iterator[DataProblem]:
    path = tokenizer_beside(prefix)
    try:
        digest = tokenizer_digest(path)
    except DataError as error:
        yield _as_problem(error, path)
        return
    if digest != meta.tokenizer_sha256:
        yield DataProblem(str(path), None, _other_content(digest, meta.tokenizer_sha256))


def _digest_problems(prefix: DataPath, split: SplitMeta) -> Iterator[DataProblem]:
    for path, wanted in ((data_path(prefix), split.bin_sha256), (index_path(prefix), split.idx_sha256)):
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            yield DataProblem(str(path), None, f"cannot be read: {error.strerror}; copy or build it again")
            continue
        if found != wanted:
            yield DataProblem(str(path), None, _other_content(found, wanted))


def _as_problem(error: DataError, *paths: DataPath) -> DataProblem:
    """Return an error that begins with one of the paths as a problem of that file."""
    path = next((path for path in paths if str(error).startswith(f"{path}: ")), paths[-1])
    return DataProblem(str(path), None, str(error).removeprefix(f"{path}: "))


def _other_content(found: str, wanted: str) -> str:
    return f"has SHA-256 {found[:12]}..., and {META_NAME} has {wanted[:12]}...; copy it or build the data again"


def _vocabulary_problems(dataset: IndexedDataset, vocab_size: int | None) -> Iterator[DataProblem]:
    """Yield one problem for all ids outside the vocabulary: the first, and how many there are.

    Raises: BadTokensError when tokens cannot be read.
    """
    first, num_wrong = -1, 0
    for start in range(0, dataset.num_tokens, _BLOCK_TOKENS):
        tokens = dataset.read_tokens(start, _BLOCK_TOKENS)
        is_wrong = tokens < 0
        if vocab_size is not None:
            is_wrong |= tokens >= vocab_size
        num_here = int(np.count_nonzero(is_wrong))
        if num_here and first < 0:
            first = start + int(is_wrong.argmax())
        num_wrong += num_here
    if num_wrong:
        limit = "below 0" if vocab_size is None else f"outside the vocabulary of {vocab_size}"
        token = int(dataset.read_tokens(first, 1)[0])
        yield DataProblem(
            str(data_path(dataset.prefix)),
            first * dataset.dtype.itemsize,
            f"token id {token} at position {first} is {limit} ({num_wrong} such tokens); copy or build the data again",
        )


def _end_problems(dataset: IndexedDataset, eod_id: int) -> Iterator[DataProblem]:
    """Yield one problem for all documents that do not end with token `eod_id`: the first, and how many there are."""
    first, num_wrong = -1, 0
    for document in range(0, dataset.num_documents, _BLOCK_DOCUMENTS):
        starts = dataset.document_starts(document, document + _BLOCK_DOCUMENTS + 1)
        ends, is_empty = starts[1:], starts[1:] == starts[:-1]
        is_wrong = (dataset.tokens_at(np.maximum(ends - 1, 0)) != eod_id) | is_empty
        num_here = int(np.count_nonzero(is_wrong))
        if num_here and first < 0:
            first = document + int(is_wrong.argmax())
        num_wrong += num_here
    if num_wrong:
        end = dataset.document_start(first + 1) * dataset.dtype.itemsize
        yield DataProblem(
            str(data_path(dataset.prefix)),
            max(0, end - dataset.dtype.itemsize),
            f"document {first} does not end with token {eod_id} ({num_wrong} of {dataset.num_documents} documents); "
            f"{index_path(dataset.prefix)} is perhaps the index of another corpus: copy both or build the data again",
        )
