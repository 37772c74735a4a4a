"""The build: its output, its reproducibility, and no files left after a failure."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import pydoc_data.topics
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.build import FILE_NAMES
from megatrain.data.dataset import check_vocabulary, open_dataset
from megatrain.data.end_of_document import END_OF_DOCUMENT
from megatrain.data.indexed import IndexedDataset
from megatrain.data.meta import read_meta
from megatrain.data.tokenizer import load_tokenizer, train_tokenizer
from tests.helpers.built_data import build_data
from tests.helpers.require import require_module
from tests.helpers.waiting import DEADLINE_S

require_module("tokenizers")

NUM_DOCUMENTS = 200


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A .jsonl of 200 documents, each identified by its number."""
    path = tmp_path / "source" / "docs.jsonl"
    path.parent.mkdir()
    rows = ({"text": f"document {number}: " + f"word{number % 7} is it. " * (number % 9)} for number in range(200))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def documents(prefix: Path) -> list[str]:
    """Return the texts of a split in their order, after checking that each ends with the end-of-document token."""
    tokenizer = load_tokenizer(prefix.parent / "tokenizer.json")
    dataset = IndexedDataset(prefix)
    texts = []
    for number in range(dataset.num_documents):
        tokens = dataset.document(number).tolist()
        assert tokens.count(tokenizer.eod_id) == 1
        assert tokens[-1] == tokenizer.eod_id
        texts.append(tokenizer.decode(tokens[:-1]))
    return texts


def sums(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_every_document_is_in_one_split_once_and_shuffled(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    meta = build_data([str(source)], output, vocab_size=400, validation_fraction=0.1)

    assert sorted(os.listdir(output)) == sorted({*FILE_NAMES} - {"tokenizer.model"})
    train, validation = documents(output / "train"), documents(output / "validation")
    originals = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    assert sorted(train + validation) == sorted(originals)
    assert 8 <= len(validation) <= 35  # 20 are expected
    numbers = [originals.index(text) for text in train]
    neighbors = sum(abs(one - other) == 1 for one, other in itertools.pairwise(numbers))
    assert neighbors < 10  # 2 are expected for a random order, 179 for no shuffling
    assert (meta.train.documents, meta.validation.documents) == (len(train), len(validation))
    assert meta.train.text_bytes == sum(map(len, train))
    assert meta.validation.text_bytes == sum(map(len, validation))


def test_meta_describes_what_was_built(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    meta = build_data([str(source)], output, vocab_size=400, seed=7)
    assert read_meta(output / "meta.json") == meta
    assert json.loads((output / "meta.json").read_text())["schema_version"] == 1
    assert (meta.sources, meta.seed, meta.text_key) == ((str(source),), 7, "text")
    assert meta.tokenizer_sha256 == hashlib.sha256((output / "tokenizer.json").read_bytes()).hexdigest()
    tokens = IndexedDataset(output / "validation").read_tokens(0, 1 << 30).tolist()
    assert meta.validation.tokens == len(tokens)
    assert meta.vocab_size == load_tokenizer(output / "tokenizer.json").vocab_size
    shares = [count / len(tokens) for count in Counter(tokens).values()]
    assert meta.unigram_entropy_nats == pytest.approx(-sum(share * math.log(share) for share in shares), rel=1e-12)


def test_documents_end_with_the_given_token(source: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "odd.json"
    train_tokenizer(["to be or not to be"], 300).save(tokenizer)
    tokenizer.write_text(tokenizer.read_text().replace(END_OF_DOCUMENT, "<|stop|>"))
    lines: list[str] = []
    with pytest.raises(DataError, match=r"odd\.json: names no token that ends documents"):
        build_data([str(source)], tmp_path / "out", tokenizer_path=tokenizer)
    with pytest.raises(DataError, match="give its file with --tokenizer"):
        build_data([str(source)], tmp_path / "out", end="<|stop|>")

    meta = build_data([str(source)], tmp_path / "out", tokenizer_path=tokenizer, end="<|stop|>", report=lines.append)

    assert f"<|stop|> ({meta.eod_id}, as given) ends documents" in lines[0]
    dataset = IndexedDataset(tmp_path / "out/train")
    assert {int(dataset.document(number)[-1]) for number in range(dataset.num_documents)} == {meta.eod_id}
    assert load_tokenizer(tmp_path / "out/tokenizer.json").eod_id == meta.eod_id


def test_seed_changes_the_order_but_not_the_split(source: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        build_data([str(source)], tmp_path / name, vocab_size=400, validation_fraction=0.1, seed=seed)
    assert sums(tmp_path / "a") == sums(tmp_path / "b")
    first, other = documents(tmp_path / "a" / "train"), documents(tmp_path / "c" / "train")
    assert sorted(first) == sorted(other)
    assert first != other


def test_a_given_tokenizer_is_used_and_kept_byte_for_byte(source: Path, tmp_path: Path) -> None:
    build_data([str(source)], tmp_path / "first", vocab_size=300)
    tokenizer = tmp_path / "first" / "tokenizer.json"
    meta = build_data([str(source)], tmp_path / "second", tokenizer_path=tokenizer)
    assert meta.vocab_size == 300
    assert sums(tmp_path / "first") == sums(tmp_path / "second")


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_both_splits_have_at_least_one_document(source: Path, tmp_path: Path, fraction: float) -> None:
    meta = build_data([str(source)], tmp_path / "out", vocab_size=300, validation_fraction=fraction)
    assert min(meta.train.documents, meta.validation.documents) == 1
    assert meta.train.documents + meta.validation.documents == NUM_DOCUMENTS


def test_the_tokenizer_learns_nothing_from_held_out_documents(tmp_path: Path) -> None:
    """With the held-out documents replaced by others of the same identity, the tokenizer stays the same."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"file {number} " + "common words here " * 20)
    build_data([str(folder)], tmp_path / "before", vocab_size=320, validation_fraction=0.3)
    for text in documents(tmp_path / "before" / "validation"):
        (folder / f"{text.split()[1]}.txt").write_text("entirely different  qqqq " * 50)
    build_data([str(folder)], tmp_path / "after", vocab_size=320, validation_fraction=0.3)
    assert sums(tmp_path / "before")["tokenizer.json"] == sums(tmp_path / "after")["tokenizer.json"]
    assert sums(tmp_path / "before")["validation.bin"] != sums(tmp_path / "after")["validation.bin"]


def test_large_batches_and_many_documents_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.data.blocks._BLOCK_DOCUMENTS", 7)
    monkeypatch.setattr("megatrain.data.build_tokenizer._TRAINING_SAMPLE_BYTES", 2000)
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {number} " * 5}) + "\n" for number in range(100)))
    meta = build_data([str(path)], tmp_path / "out", vocab_size=300)
    assert meta.train.documents + meta.validation.documents == 100


@pytest.mark.slow
def test_building_loads_no_torch(source: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from megatrain.data.build import BuildOptions, build; "
        f"build([{str(source)!r}], Path({str(tmp_path / 'out')!r}), BuildOptions(vocab_size=300)); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=DEADLINE_S, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "False"


BAD_INPUTS: list[tuple[bytes, dict[str, object], str]] = [
    (b'{"text": "a"}\n' * 50 + b'{"text": "caf\xe9"}\n', {}, r"bad\.jsonl:51: is not UTF-8"),
    (b"", {}, r"bad\.jsonl: holds no text"),
    (
        b'{"text": "a"}\n',
        {},
        r"bad\.jsonl: 1 document with text; at least two are needed, one to train on and one to hold out",
    ),
    (b'{"text": ""}\n' * 3, {}, r"bad\.jsonl: 0 documents with text"),
    (b'{"text": "a"}\n' * 9, {"vocab_size": 100}, r"vocab_size=100 must be at least 257"),
    (b'{"text": "a"}\n' * 9, {"validation_fraction": 0.0}, r"validation=0\.0 must be above 0 and below 1"),
    (b'{"text": "a"}\n' * 9, {"tokenizer_path": Path("no/such.json")}, r"no/such\.json: the tokenizer cannot be"),
]


def test_bad_input_leaves_nothing_behind(tmp_path: Path) -> None:
    for lines, options, message in BAD_INPUTS:
        (tmp_path / "bad.jsonl").write_bytes(lines)
        with pytest.raises(DataError, match=message):
            build_data([str(tmp_path / "bad.jsonl")], tmp_path / "out", **{"vocab_size": 300, **options})
        assert os.listdir(tmp_path) == ["bad.jsonl"], message


@pytest.mark.parametrize("phase", ["tokenizer:", "tokenized:", "written:"])
def test_an_interrupt_in_any_phase_leaves_the_old_data(source: Path, tmp_path: Path, phase: str) -> None:
    def interrupt(line: str) -> None:
        if line.startswith(phase):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_data([str(source)], tmp_path / "out", vocab_size=300, report=interrupt)
    assert not (tmp_path / "out").exists()

    build_data([str(source)], tmp_path / "out", vocab_size=300)
    before = sums(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        build_data([str(source)], tmp_path / "out", vocab_size=320, is_forced=True, report=interrupt)
    assert sums(tmp_path / "out") == before
    build_data([str(source)], tmp_path / "out", vocab_size=330, is_forced=True)
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


@pytest.mark.slow
def test_a_corpus_of_one_book_can_be_built(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    shutil.copyfile(pydoc_data.topics.__file__, book)
    meta = build_data([str(book)], tmp_path / "out", vocab_size=1024)
    assert meta.train.text_bytes + meta.validation.text_bytes == book.stat().st_size
    assert meta.validation.documents == 1
    text = book.read_text()
    assert all(piece in text for piece in documents(tmp_path / "out" / "train"))


def test_data_that_does_not_fit_the_model_is_refused(source: Path, tmp_path: Path) -> None:
    meta = build_data([str(source)], tmp_path / "out", vocab_size=300)
    prefix = tmp_path / "out" / "train"
    check_vocabulary(prefix, meta, 300)
    assert open_dataset(prefix, 300)[0].num_documents > 0
    with pytest.raises(DataError, match=r"out/meta\.json: the data at .*out/train has a vocabulary of 300, more than "):
        check_vocabulary(prefix, meta, 299)
    check_vocabulary(prefix, None, 299)
    largest = int(np.max(IndexedDataset(prefix).read_tokens(0, 1 << 30)))
    with pytest.raises(DataError, match=rf"train\.bin at byte .*: token id {largest} .* model\.vocab_size={largest}"):
        open_dataset(prefix, largest)


DAMAGED_METAS = [
    ("{", r"meta\.json: cannot be read"),
    (
        '{"format": "megatrain-data", "schema_version": 9}',
        r"meta\.json: has schema_version 9, this program reads 1",
    ),
    ('{"format": "megatrain-data", "schema_version": 1}', r"meta\.json: is damaged \(KeyError\('sources'\)\)"),
    (100_000 * "[", r"meta\.json: cannot be read"),
]


def test_damaged_meta_is_named(tmp_path: Path) -> None:
    for content, message in DAMAGED_METAS:
        (tmp_path / "meta.json").write_text(content)
        with pytest.raises(DataError, match=message):
            read_meta(tmp_path / "meta.json")


METAS_OF_OTHER_TYPES: list[tuple[dict[str, object], str]] = [
    ({"vocab_size": "300"}, r"is damaged \(vocab_size='300' is not of type int\); build the data again"),
    ({"vocab_size": True}, r"is damaged \(vocab_size=True is not of type int\)"),
    ({"tokenizer_sha256": None}, r"is damaged \(tokenizer_sha256=None is not of type str\)"),
    ({"text_key": 3}, r"is damaged \(text_key=3 is not of type str \| None\)"),
    (
        {"train": {"documents": 1, "tokens": 2.5, "text_bytes": 3, "bin_sha256": "", "idx_sha256": ""}},
        r"is damaged \(tokens=2.5 is not of type int\)",
    ),
    ({"train": {"documents": 1}}, r"is damaged \(TypeError"),
]


def test_meta_with_values_of_other_types_is_named(source: Path, tmp_path: Path) -> None:
    build_data([str(source)], tmp_path / "out", vocab_size=300)
    path = tmp_path / "out" / "meta.json"
    content = json.loads(path.read_text())
    for change, message in METAS_OF_OTHER_TYPES:
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(DataError, match=message):
            read_meta(path)


def test_meta_of_another_program_is_no_meta(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"vocab_size": 7}')
    assert read_meta(tmp_path / "meta.json") is None
    assert read_meta(tmp_path / "none.json") is None
