"""The tokenizers of bytes and of SentencePiece, each compared with the library that defines it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.dataset import check_tokenizer
from megatrain.data.indexed import IndexedDataset
from megatrain.data.tokenizer import byte_tokenizer, load_tokenizer, train_tokenizer
from tests.helpers.built_data import build_data
from tests.helpers.require import require_module
from tests.helpers.sentencepiece_model import sentencepiece_model

tokenizers = require_module("tokenizers")
sentencepiece = require_module("sentencepiece")

TEXTS = [
    "the cat sat on the mat, the hat", "na\u00efve caf\u00e9 \U0001f600 \u6f22\u5b57",
    "\x00\x01\x7f\x80\x9f\xa0\xad\xff",
    " lead\r\n\ttail  ", "", "<|endoftext|> </s> <s>", "".join(map(chr, range(0x180))),
]  # fmt: skip


def test_byte_tokenizer_agrees_with_its_file_in_the_library(tmp_path: Path) -> None:
    ours = byte_tokenizer()
    ours.save(tmp_path / "tokenizer.json")
    theirs = load_tokenizer(tmp_path / "tokenizer.json")
    assert ours.encode_batch(TEXTS) == theirs.encode_batch(TEXTS) == [list(text.encode()) for text in TEXTS]
    assert (ours.vocab_size, ours.eod_id) == (theirs.vocab_size, theirs.eod_id) == (257, 256)
    ids = [*TEXTS[1].encode(), 256, *b"next", 256]
    assert ours.decode(ids) == theirs.decode(ids) == f"{TEXTS[1]}<|endoftext|>next<|endoftext|>"


@pytest.fixture(scope="module")
def model() -> bytes:
    """A SentencePiece model of 300 pieces, with bytes for unknown characters."""
    return sentencepiece_model()


def test_sentencepiece_ids_are_those_of_the_library(model: bytes, tmp_path: Path) -> None:
    path = tmp_path / "odd.model"
    path.write_bytes(model)
    ours, theirs = load_tokenizer(path), sentencepiece.SentencePieceProcessor(model_proto=model)
    assert ours.encode_batch(TEXTS) == [theirs.encode(text) for text in TEXTS]
    assert ours.encode(TEXTS[0]) == theirs.encode(TEXTS[0])
    assert (ours.vocab_size, ours.end, ours.eod_id) == (theirs.get_piece_size(), "</s>", theirs.eos_id())
    assert ours.decode([*ours.encode(TEXTS[0]), ours.eod_id]) == TEXTS[0]
    assert ours.eod_id not in ours.encode("a </s> b")
    ours.save(tmp_path / "copy.model")
    assert (tmp_path / "copy.model").read_bytes() == model


def test_sentencepiece_without_bytes_loses_characters(model: bytes, tmp_path: Path) -> None:
    path = tmp_path / "odd.model"
    path.write_bytes(model)
    assert load_tokenizer(path).losses == ()
    path.write_bytes(sentencepiece_model(byte_fallback=False, vocab_size=30))
    (loss,) = load_tokenizer(path).losses
    assert loss.startswith("characters that its vocabulary lacks, such as U+0531, ")
    assert byte_tokenizer().losses == train_tokenizer(TEXTS, 300).losses == ()


def test_file_that_is_no_sentencepiece_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.model"
    for content in (b"", b"\xff\xfe", b'{"model": 1}'):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.model: is not a SentencePiece model"):
            load_tokenizer(path)


def test_missing_sentencepiece_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.model").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"a\.model: .*pip install 'megatrain\[sentencepiece\]'"):
        load_tokenizer(tmp_path / "a.model")


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_build_keeps_its_tokenizer_and_training_accepts_it(tmp_path: Path, model: bytes, kind: str) -> None:
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(f"the cat {number} sat on \u00e9 mat")
    path = Path("bytes")
    if kind == "sentencepiece":
        path = tmp_path / "llama.model"
        path.write_bytes(model)
    output = tmp_path / "out"
    meta = build_data([str(tmp_path / f"{number}.txt") for number in range(9)], output, tokenizer_path=path)
    (stored,) = [*output.glob("tokenizer.json"), *output.glob("tokenizer.model")]
    assert (stored.suffix == ".model") == (kind == "sentencepiece")
    check_tokenizer(stored, output / "train", meta, meta.vocab_size)
    with pytest.raises(DataError, match=rf"{stored.name}: has {meta.vocab_size} tokens, more than model\.vocab_size"):
        check_tokenizer(stored, output / "train", meta, meta.vocab_size - 1)
    other = tmp_path / "other.json"
    train_tokenizer(TEXTS, 270).save(other)
    with pytest.raises(DataError, match=rf"set data\.tokenizer={stored}"):
        check_tokenizer(other, output / "train", meta, meta.vocab_size)
    dataset, tokenizer = IndexedDataset(output / "train"), load_tokenizer(stored)
    texts: list[Any] = [tokenizer.decode(dataset.document(0)[:-1].tolist())]
    assert texts[0].startswith("the cat ")
    assert int(dataset.document(0)[-1]) == meta.eod_id
