"""`megatrain data build` and `megatrain data inspect` as a user sees them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from megatrain.commands import data
from megatrain.contracts.errors import DataError
from tests.helpers.require import require_module

require_module("tokenizers")


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return data.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def built(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"this is text number {number}\n" * (number + 1))
    assert run("build", "--input", folder, "--output", tmp_path / "out", "--vocab-size", 300, "--validation", 0.1) == 0
    return tmp_path / "out"


def test_build_says_what_it_made_and_where(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("build", "--input", built.parent / "texts", "--output", built, "--vocab-size", 310)
    with pytest.raises(DataError, match="already holds a data set"):
        run(*arguments)
    capsys.readouterr()
    assert run(*arguments, "--force") == 0
    text = capsys.readouterr().out
    assert "tokenizer: 310 tokens" in text
    assert "unigram entropy of the held-out tokens:" in text
    assert f"data.train={built / 'train'} data.validation={built / 'validation'}" in text


def test_inspect_prints_facts_and_documents(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run("inspect", built / "train", "--documents", 2) == 0
    text = capsys.readouterr().out
    assert "documents, " in text
    assert "of a vocabulary of 300" in text
    assert text.count("--- document") == 2
    assert "this is text number" in text


def test_inspect_json_holds_the_true_numbers(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meta = json.loads((built / "meta.json").read_text())
    capsys.readouterr()
    assert run("inspect", built / "validation", "--json", "--documents", 1) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_tokens"] == meta["validation"]["tokens"]
    assert facts["num_documents"] == meta["validation"]["documents"]
    assert facts["unigram_entropy_nats"] == pytest.approx(meta["unigram_entropy_nats"])
    assert facts["vocab_size"] == 300
    assert facts["length_p50"] <= facts["length_p90"] <= facts["length_max"]
    assert facts["documents"][0].startswith("this is text number")


def test_inspect_reads_token_files_of_others(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (built / "meta.json").unlink()
    (built / "tokenizer.json").unlink()
    capsys.readouterr()
    assert run("inspect", built / "train") == 0
    assert "distinct tokens, largest id" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"tokenizer\.json: the tokenizer cannot be read"):
        run("inspect", built / "train", "--documents", 1)


def test_inspect_refuses_a_truncated_file(built: Path) -> None:
    path = built / "train.bin"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"train\.bin: the tokens that .*train\.idx lists takes"):
        run("inspect", built / "train")


def test_a_verb_is_needed() -> None:
    with pytest.raises(SystemExit) as exit_info:
        run()
    assert exit_info.value.code == 2
