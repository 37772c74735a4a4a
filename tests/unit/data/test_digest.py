"""The digest of a data set changes with its content, its order and its documents, and costs the same at any size."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from megatrain.data.dataset import BLOCK_TOKENS, BLOCKS, block_starts, data_digest, open_dataset
from megatrain.data.indexed import IndexedDataset
from megatrain.data.indexed_writer import IndexedWriter

Documents = list[NDArray[np.int64]]


def digest_of(documents: Sequence[NDArray[np.int64]], prefix: Path, dtype: type = np.uint16) -> str:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(document)
    return data_digest(IndexedDataset(prefix))


def documents_of(num_tokens: int) -> Documents:
    tokens = np.random.default_rng(0).integers(0, 1000, num_tokens)
    return np.array_split(tokens, 10)


CHANGES: dict[str, Callable[[Documents], Documents]] = {
    "another order": lambda one: [*one[1:], one[0]],
    "reversed": lambda one: one[::-1],
    "the last token": lambda one: [*one[:-1], np.append(one[-1][:-1], one[-1][-1] + 1)],
    "other bounds of documents": lambda one: [one[0][:50], np.concatenate([one[0][50:], one[1]]), *one[2:]],
    "a document less": lambda one: one[:-1],
}


@pytest.mark.parametrize("num_tokens", [1000, 3 * BLOCKS * BLOCK_TOKENS])
def test_a_change_changes_the_digest(tmp_path: Path, num_tokens: int) -> None:
    documents = documents_of(num_tokens)
    before = digest_of(documents, tmp_path / "before")
    assert digest_of(documents, tmp_path / "same") == before
    for name, change in CHANGES.items():
        assert digest_of(change(documents), tmp_path / "after") != before, name


def test_another_type_of_ids_changes_the_digest(tmp_path: Path) -> None:
    documents = documents_of(1000)
    assert digest_of(documents, tmp_path / "a") != digest_of(documents, tmp_path / "b", np.int32)


def test_open_data_are_read_once_and_have_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = digest_of(documents_of(BLOCKS * BLOCK_TOKENS), tmp_path / "t")
    pread, num_read = os.pread, list[int]()

    def counting(descriptor: int, num_bytes: int, offset: int) -> bytes:
        content = pread(descriptor, num_bytes, offset)
        num_read.append(len(content))
        return content

    monkeypatch.setattr(os, "pread", counting)
    for replaces in (False, True):
        num_read.clear()
        assert open_dataset(tmp_path / "t", 1000, replaces_bad_samples=replaces)[1] == expected
        assert sum(num_read) == (tmp_path / "t.bin").stat().st_size


def test_few_blocks_cover_both_ends() -> None:
    for length in (0, 1, BLOCK_TOKENS, BLOCKS * BLOCK_TOKENS, 10**13):
        starts = block_starts(length)
        assert len(starts) <= BLOCKS, length
        assert starts[0] == 0, length
        assert starts[-1] == max(length - BLOCK_TOKENS, 0), length
        if length <= BLOCKS * BLOCK_TOKENS:
            assert all(np.diff(starts) <= BLOCK_TOKENS), length
