"""`megatrain data verify` names every kind of damage with its file and byte; intact files pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.indexed import IndexedDataset
from megatrain.data.indexed_writer import IndexedWriter
from megatrain.data.verification import verify_data
from tests.helpers.built_data import build_data
from tests.helpers.require import require_module

require_module("tokenizers")

EOD, VOCAB_SIZE = 256, 257


def built_from(tmp_path: Path, name: str, texts: list[str]) -> Path:
    source = tmp_path / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_data([str(source)], tmp_path / name, tokenizer_path=Path("bytes"), validation_fraction=0.3)
    return tmp_path / name


@pytest.fixture
def built(tmp_path: Path) -> Path:
    return built_from(tmp_path, "out", [f"document {number} " * (number + 1) for number in range(20)])


def problems(path: Path, vocab_size: int | None = None) -> list[str]:
    return [str(problem) for pair in verify_data(path, vocab_size) for problem in pair.problems]


def set_token(path: Path, position: int, token: int) -> None:
    tokens = np.fromfile(path, "<u2")
    tokens[position] = token
    tokens.tofile(path)


def test_sound_data_has_no_problems(built: Path) -> None:
    directory = verify_data(built)
    assert [Path(pair.prefix).name for pair in directory] == ["train", "validation"]
    assert not any(pair.problems for pair in directory)
    assert sum(pair.documents for pair in directory) == 20
    assert problems(built / "train") == []


def test_token_outside_the_vocabulary_is_named_with_its_byte(built: Path) -> None:
    path = built / "train.bin"
    for position in (7, 3):
        set_token(path, position, VOCAB_SIZE + position)
    digest, vocabulary = problems(built)
    assert digest.startswith(f"{path}: has SHA-256 ")
    assert vocabulary.startswith(
        f"{path} at byte 6: token id 260 at position 3 is outside the vocabulary of 257 (2 such tokens)"
    )


def test_index_of_another_corpus_is_named(built: Path, tmp_path: Path) -> None:
    """The other corpus has as many tokens in as many documents, so only the ends of documents differ."""
    lengths = IndexedDataset(built / "train").sequence_lengths
    with IndexedWriter(tmp_path / "other", np.dtype("<u2")) as writer:
        for length in sorted(lengths.tolist(), reverse=True):
            writer.add_document(np.zeros(length))
    shutil.copyfile(tmp_path / "other.idx", built / "train.idx")
    digest, ends = problems(built)
    assert digest.startswith(f"{built}/train.idx: has SHA-256 ")
    assert f"{built}/train.bin at byte " in ends
    assert f"does not end with token {EOD} (" in ends
    assert f"{built}/train.idx is perhaps the index of another corpus" in ends


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


DAMAGE: dict[str, tuple[str, Callable[[Path], object], list[str]]] = {
    "cut tokens": ("train.bin", cut, ["train.bin: has SHA-256", "train.bin: the tokens that"]),
    "cut index": ("validation.idx", cut, ["validation.idx: has SHA-256", "validation.idx: an index of"]),
    "no tokens": ("train.bin", Path.unlink, ["train.bin: cannot be read", "train.bin: cannot be read"]),
    "other tokenizer": (
        "tokenizer.json",
        lambda path: path.write_text(path.read_text() + "\n"),
        ["tokenizer.json: has SHA-256"] * 2,
    ),
    "no tokenizer": ("tokenizer.json", Path.unlink, ["tokenizer.json: the tokenizer cannot be read"] * 2),
    "one bit": ("train.bin", lambda path: set_token(path, 0, 1), ["train.bin: has SHA-256"]),
}


def test_damage_is_named_and_the_rest_verified(built: Path) -> None:
    for damage, (name, act, expected) in DAMAGE.items():
        content = (built / name).read_bytes()
        act(built / name)
        found = problems(built)
        (built / name).write_bytes(content)
        assert len(found) == len(expected), damage
        for problem, text in zip(found, expected, strict=True):
            assert problem.startswith(f"{built}/{text}"), (damage, problem)
            assert problem.count(str(built)) <= 2, "the file is named once, with at most one other file"


def test_pair_from_elsewhere_is_checked_against_the_option(built: Path) -> None:
    (built / "meta.json").unlink()
    assert problems(built) == problems(built / "train", VOCAB_SIZE) == []
    found = problems(built / "train", EOD)
    assert len(found) == 1
    assert "token id 256" in found[0]
    with pytest.raises(DataError, match=r"holds no \.bin/\.idx pair; give a data directory or the prefix"):
        verify_data(built.parent)
