"""The subcommands of `megatrain data` from the user's point of view."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.commands import data
from megatrain.contracts.errors import DataError
from megatrain.data.indexed import IndexedDataset
from megatrain.data.order import SampleOrder
from megatrain.data.tokenizer import load_tokenizer
from tests.helpers.require import require_module

tokenizers = require_module("tokenizers")


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return data.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with texts and the data that were built from them; tests change copies."""
    root = tmp_path_factory.mktemp("template")
    (root / "texts").mkdir()
    for number in range(60):
        (root / "texts" / f"{number:02}.txt").write_text(f"this is text number {number}\n" * (number + 1))
    texts, output = root / "texts", root / "out"
    assert run("build", "--input", texts, "--output", output, "--vocab-size", 300, "--validation", 0.1) == 0
    return root


@pytest.fixture
def built(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return tmp_path / "out"


def test_build_prints_its_output_and_path(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("build", "--input", built.parent / "texts", "--output", built, "--vocab-size", 310)
    with pytest.raises(DataError, match="already holds a data set"):
        run(*arguments)
    capsys.readouterr()
    assert run(*arguments, "--force") == 0
    text = capsys.readouterr().out
    assert "tokenizer: 310 tokens" in text
    assert "unigram entropy of the held-out tokens:" in text
    assert f"data.train={built / 'train'} data.validation={built / 'validation'}" in text


@pytest.fixture
def with_other_files(built: Path) -> Path:
    """A corpus with folders named like Python's own, whose texts count, and with files that are ignored."""
    texts = built.parent / "texts"
    for name in ("__pycache__", "site-packages", "deep/dist-packages"):
        (texts / name).mkdir(parents=True)
        (texts / name / "a.txt").write_text(f"found in {name}")
    for name in ("one.md", "two.MD", "deep/three.pdf", "no-suffix"):
        (texts / name).write_text("no document")
    (texts / "again").symlink_to(texts / "deep")
    return texts


LEFT_OUT = {
    "files of another kind (.md)": 2,
    "files of another kind (.pdf)": 1,
    "files of another kind (no suffix)": 1,
    "folders that are read already": 1,
}


def test_build_counts_left_out_files_by_reason(
    built: Path, with_other_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("build", "--input", with_other_files, "--output", built, "--tokenizer", "bytes", "--force")
    capsys.readouterr()
    assert run(*arguments) == 0
    lines = [line.removeprefix("skipped:").split(maxsplit=1) for line in capsys.readouterr().out.splitlines()
             if line.startswith("skipped:")]  # fmt: skip
    assert {reason: int(count) for count, reason in lines} == LEFT_OUT
    meta = json.loads((built / "meta.json").read_text())
    assert meta["skipped"] == LEFT_OUT
    assert meta["train"]["documents"] + meta["validation"]["documents"] == 60 + 3
    assert printed(capsys, *arguments)["meta"]["skipped"] == LEFT_OUT


def test_strict_build_refuses_left_out_files(built: Path, with_other_files: Path) -> None:
    arguments = ("build", "--input", with_other_files, "--output", built.parent / "new", "--tokenizer", "bytes",
                 "--strict")  # fmt: skip
    with pytest.raises(DataError, match=r"texts/again: folders that are read already; known kinds: .*without --strict"):
        run(*arguments)
    assert not (built.parent / "new").exists()


def test_build_ends_documents_with_the_given_token(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tmp_path / "word-level.json"
    words = {"<unk>": 0, "this": 1, "[EOS]": 2, "<|END_OF_TURN_TOKEN|>": 3, "<end>": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.save(str(tokenizer))
    arguments = ("build", "--input", tmp_path / "texts", "--output", built, "--tokenizer", tokenizer, "--force")
    for given, end, source in [
        ((), 3, "a name that known models use"),
        (("--eod", "[EOS]"), 2, "as given"),
        (("--eod", "<end>"), 4, "as given"),
    ]:
        capsys.readouterr()
        assert run(*arguments, *given) == 0
        output = capsys.readouterr().out
        assert f"({end}, {source}) ends documents" in output
        assert "tokenizer: WARNING: loses characters that its vocabulary lacks" in output
        assert json.loads((built / "meta.json").read_text())["eod_id"] == end
        assert int(IndexedDataset(built / "train").document(0)[-1]) == end
    with pytest.raises(DataError, match=r"word-level\.json: has no token '<gone>'"):
        run(*arguments, "--eod", "<gone>")


def test_inspect_prints_facts_and_documents(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run("inspect", built / "train", "--documents", 2) == 0
    text = capsys.readouterr().out
    assert "documents, " in text
    assert "of a vocabulary of 300" in text
    assert text.count("--- document") == 2
    assert "this is text number" in text

    meta = json.loads((built / "meta.json").read_text())
    facts = printed(capsys, "inspect", built / "validation", "--documents", 1)
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


def printed(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    """Run a subcommand with --json, and return the JSON object that it prints."""
    capsys.readouterr()
    assert run(*arguments, "--json") == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_subcommand_prints_one_json_object(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, root = built.parent / "texts", built.parent
    made = printed(capsys, "build", "--input", texts, "--output", root / "made", "--tokenizer", "bytes")
    assert made["output"] == str(root / "made")
    assert made["meta"]["train"]["documents"] + made["meta"]["validation"]["documents"] == 60
    assert printed(capsys, "verify", built)["is_sound"]
    drawn = printed(capsys, "sample", built / "train", "--count", 4)
    assert len({one["number"] for one in drawn["samples"]}) == 4
    assert all(one["text"].startswith("this is text number") for one in drawn["samples"])
    merged = printed(capsys, "merge", built, built, "--output", root / "twice")
    assert merged["meta"]["train"]["documents"] == 2 * printed(capsys, "inspect", built / "train")["num_documents"]
    pair = printed(capsys, "merge", built / "train", "--output", root / "pair")
    assert pair == {"schema_version": 1, "output": str(root / "pair"), "meta": None}
    exported = printed(capsys, "export", built / "train", "--output", root / "out.jsonl", "--first", 2, "--count", 3)
    assert exported["documents"] == len((root / "out.jsonl").read_text().splitlines()) == 3


def test_verify_names_damage_and_ends_with_its_code(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", built) == 0
    assert "train: OK, " in capsys.readouterr().out
    with (built / "train.bin").open("r+b") as file:
        file.write(b"\xff\xff")
    assert run("verify", built) == 65
    text = capsys.readouterr().out
    assert "train: DAMAGED" in text
    assert "train.bin at byte 0: token id 65535 at position 0 is outside the vocabulary of 300" in text
    assert "validation: OK, " in text
    found = printed(capsys, "verify", built, code=65)
    assert [problem["offset"] for problem in found["pairs"][0]["problems"]] == [None, 0]


def test_sample_shows_what_training_reads(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = IndexedDataset(built / "train")
    found = printed(capsys, "sample", built / "train", "--seq-len", 16, "--first", 5, "--count", 2, "--seed", 7)
    starts = SampleOrder(dataset.num_tokens, 16, 7).window_starts(np.array([5, 6])).tolist()
    assert [(one["number"], one["start"], one["num_tokens"]) for one in found["samples"]] == [
        (5, starts[0], 16), (6, starts[1], 16),
    ]  # fmt: skip
    tokenizer = load_tokenizer(built / "tokenizer.json")
    assert found["samples"][0]["text"] == tokenizer.decode(dataset.window(starts[0], 16).tolist())
    assert run("sample", built / "train", "--count", 1) == 0
    assert "--- document " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run("sample", built / "train", "--first", 5)


def test_a_subcommand_is_needed() -> None:
    with pytest.raises(SystemExit) as exit_info:
        run()
    assert exit_info.value.code == 2


def test_a_url_gives_what_the_path_gives(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    verbs = (("inspect", "--documents", 2), ("sample", "--count", 2), ("sample", "--seq-len", 16), ("verify",))
    for verb, *options in verbs:
        found = []
        for prefix in (built / "train", f"file://{built}/train"):
            assert run(verb, prefix, *options, "--json") == 0
            found.append(capsys.readouterr().out.replace(f"file://{built}", str(built)))
        assert found[0] == found[1]
    assert run("verify", f"file://{built}") == 0
    assert capsys.readouterr().out.count(": OK, ") == 2
    with pytest.raises(DataError, match="only local files can be packed; pack a local copy"):
        run("pack", f"file://{built}/train", "--seq-len", 16)
