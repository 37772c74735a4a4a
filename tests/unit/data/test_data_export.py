"""Exported documents equal the built ones: read by our own readers, by json and by pyarrow."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from pathlib import Path

import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.corpus import open_corpus
from megatrain.data.export import exported, write_records
from megatrain.data.indexed import IndexedDataset
from megatrain.data.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.built_data import build_data
from tests.helpers.require import require_module

require_module("tokenizers")
pyarrow = require_module("pyarrow")
parquet = require_module("pyarrow.parquet")

TEXTS = [f"document {number} \u00e9\n\t{'x' * number}" for number in range(40)]


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    source = tmp_path / "docs.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    build_data([str(source)], tmp_path / "data", vocab_size=300, validation_fraction=0.02)
    return IndexedDataset(tmp_path / "data" / "train")


@pytest.fixture
def tokenizer(dataset: IndexedDataset) -> Tokenizer:
    return load_tokenizer(dataset.prefix.with_name("tokenizer.json"))


SUFFIXES = [".jsonl", ".ndjson.gz", ".jsonl.zst", ".jsonl.bz2", ".jsonl.xz", ".parquet", ".arrow"]


def test_texts_come_back_through_every_kind(dataset: IndexedDataset, tokenizer: Tokenizer, tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        path = tmp_path / f"out{suffix}"
        count = write_records(exported(dataset, tokenizer, 0, 1000), "body", path)
        texts = [document.text for document in open_corpus([str(path)], "body").documents()]
        assert count == len(texts) == dataset.num_documents, suffix
        assert set(texts) <= set(TEXTS), suffix
        assert texts[0] == tokenizer.decode(dataset.document(0)[:-1].tolist()), suffix
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []


def test_ids_of_a_part_are_read_by_others(dataset: IndexedDataset, tmp_path: Path) -> None:
    ids = [dataset.document(number).tolist() for number in (5, 6, 7)]
    for suffix in (".jsonl.gz", ".parquet"):
        assert write_records(exported(dataset, None, 5, 3), "tokens", tmp_path / f"out{suffix}") == 3
    lines = gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()).splitlines()
    assert [json.loads(line)["tokens"] for line in lines] == ids
    assert parquet.read_table(tmp_path / "out.parquet")["tokens"].to_pylist() == ids


def test_export_is_refused_before_anything_is_replaced(
    dataset: IndexedDataset, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("mine")
    with pytest.raises(DataError, match=r"out\.jsonl: exists; choose another --output or replace it with --force"):
        write_records(iter(["text"]), "text", path)
    for name in ("out.txt", "out", "out.parquet.gz"):
        with pytest.raises(DataError, match=rf"{name}: unknown kind of file; use \.jsonl"):
            write_records(iter(["text"]), "text", tmp_path / name)
    with pytest.raises(DataError, match=r"train: has \d+ documents, counted from 0, so none is number 999"):
        write_records(exported(dataset, tokenizer, 999, 1), "text", path, is_forced=True)
    assert path.read_text() == "mine"
    with pytest.raises(DataError, match=r"no/such\.jsonl: cannot be written: No such file"):
        write_records(iter(["text"]), "text", tmp_path / "no" / "such.jsonl")
    assert write_records(itertools.repeat("text", 2), "text", path, is_forced=True) == 2
