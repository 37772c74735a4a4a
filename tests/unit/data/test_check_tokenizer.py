"""Whether a tokenizer matches the data and the model, with and without the tokenizers library."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.dataset import check_same_tokenizer, check_tokenizer
from megatrain.data.end_of_document import END_OF_DOCUMENT
from megatrain.data.meta import read_meta, read_metas
from tests.helpers.built_data import build_data
from tests.helpers.require import require_module

require_module("tokenizers")

VOCAB_SIZE = 270


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A data directory with a tokenizer of a given number of tokens."""
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(f"this is text number {number}, in common words\n" * 20)
    build_data([str(path) for path in sorted(tmp_path.glob("*.txt"))], tmp_path / "out", vocab_size=VOCAB_SIZE)
    return tmp_path / "out"


@pytest.fixture(params=[True, False], ids=["with the library", "without the library"])
def has_library(request: pytest.FixtureRequest, built: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setitem(sys.modules, "tokenizers", None)
    return bool(request.param)


def check(tokenizer: Path, prefix: Path, vocab_size: int) -> None:
    check_tokenizer(tokenizer, prefix, read_meta(prefix.parent / "meta.json"), vocab_size)


def test_tokenizer_of_the_data_is_accepted_if_it_fits_the_model(built: Path, has_library: bool) -> None:
    check(built / "tokenizer.json", built / "train", VOCAB_SIZE)
    check(built / "tokenizer.json", built / "validation", VOCAB_SIZE + 1)
    if not has_library:
        check(built / "tokenizer.json", built / "train", VOCAB_SIZE - 1)
        return
    with pytest.raises(DataError, match=r"has 270 tokens, more than model\.vocab_size=269; set model\.vocab_size=270"):
        check(built / "tokenizer.json", built / "train", VOCAB_SIZE - 1)


def test_another_tokenizer_is_refused_with_both_files_named(built: Path, has_library: bool) -> None:
    other = built.parent / "other.json"
    other.write_text((built / "tokenizer.json").read_text() + "\n")
    with pytest.raises(
        DataError,
        match=rf"other\.json: is not the tokenizer that made .*out/train: .*out/meta\.json has another SHA-256 .* "
        rf"set data\.tokenizer={built}/tokenizer\.json",
    ):
        check(other, built / "train", VOCAB_SIZE)
    (built / "meta.json").unlink()
    check(other, built / "train", VOCAB_SIZE)


def test_file_that_is_not_a_tokenizer_is_named(built: Path, has_library: bool) -> None:
    path = built.parent / "tokenizer.json"
    with pytest.raises(DataError, match=r"tokenizer\.json: the tokenizer cannot be read: No such file"):
        check(path, built / "train", VOCAB_SIZE)
    message = r"tokenizer\.json: is not a tokenizer\.json .*set data\.tokenizer to the file that"
    for content in (b"", b"\xff\xfe\x00", b"[" * 100_000, b'{"vocab_size": 3}', b'{"model": "bpe"}', b'["model"]'):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            check(path, built / "train", VOCAB_SIZE)


def test_a_tokenizer_that_cannot_be_loaded_is_refused(built: Path) -> None:
    (built / "meta.json").unlink()
    path = built / "tokenizer.json"
    whole = path.read_text()
    path.write_text(json.dumps({**json.loads(whole), "model": {"type": "no such model"}}))
    with pytest.raises(DataError, match=r"tokenizer\.json: is not a tokenizer\.json of the tokenizers library: "):
        check(path, built / "train", VOCAB_SIZE)
    # Training needs no end of documents, because the data are built.
    path.write_text(whole.replace(END_OF_DOCUMENT, "<|stop|>"))
    check(path, built / "train", VOCAB_SIZE)


def test_data_of_two_tokenizers_are_refused_with_both_named(built: Path) -> None:
    other = built.parent / "second"
    build_data([str(path) for path in sorted(built.parent.glob("*.txt"))], other, vocab_size=VOCAB_SIZE - 5)
    keys = {"data.train": built / "train", "data.validation": other / "validation"}
    with pytest.raises(
        DataError,
        match=rf"^data\.validation='.*second/validation': its tokens were made with another tokenizer .* than those of "
        rf"data\.train='.*out/train' .*--tokenizer {built}/tokenizer\.json",
    ):
        check_same_tokenizer(keys, read_metas(keys))
    of_one = {**keys, "data.validation": built / "validation"}
    check_same_tokenizer(of_one, read_metas(of_one))
    (other / "meta.json").unlink()
    check_same_tokenizer(keys, read_metas(keys))
