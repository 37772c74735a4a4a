"""A run with data of several tokenizers is refused when it opens them; data of an unknown tokenizer are named."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.config.config import Config
from megatrain.config.serialize import to_toml
from megatrain.contracts.errors import DataError
from megatrain.data.meta import META_NAME, DataMeta, SplitMeta
from megatrain.data.tokenizer import byte_tokenizer
from megatrain.training.training_data import open_reader, tokenizer_notes
from tests.helpers.require import require_module
from tests.helpers.tiny_data import write_corpus
from tests.helpers.training_case import make_config

require_module("tokenizers")

VOCAB_SIZE = 300


def write_set(directory: Path, name: str, tokenizer: str | None) -> str:
    """Write 200 separate tokens, with the digest of their tokenizer if it is known; return their prefix."""
    prefix = write_corpus(directory / name / "train", 200, VOCAB_SIZE, seed=sum(name.encode()))
    if tokenizer is not None:
        split = SplitMeta(1, 200, 200, "", "")
        meta = DataMeta(("text",), "text", 0, 0.1, VOCAB_SIZE, 0, tokenizer, 1.0, {}, split, split)
        (prefix.parent / META_NAME).write_text(meta.to_json())
    return str(prefix)


BYTES, OTHER = "the byte tokenizer", "d" * 64
CASES: dict[str, tuple[dict[str, dict[str, str]], tuple[str, str] | None, tuple[str, ...]]] = {
    "training and validation": (
        {"data": {"train": BYTES, "validation": OTHER}}, ("data.validation", "data.train"), (),
    ),
    "two sources": (
        {"data_source": {"path": BYTES}, "data_source-2": {"path": OTHER}}, ("data_source-2.path", "data_source.path"),
        (),
    ),
    "a later validation set": (
        {"data": {"train": BYTES}, "validation_set": {"path": BYTES}, "validation_set-2": {"path": OTHER}},
        ("validation_set-2.path", "data.train"), (),
    ),
    "a set and data.tokenizer": ({"data": {"train": OTHER, "tokenizer": BYTES}}, ("tokenizer.json", ""), ()),
    "a validation set and data.tokenizer": (
        {"data": {"train": "", "tokenizer": BYTES}, "data_source": {"path": ""}, "validation_set": {"path": OTHER}},
        ("tokenizer.json", ""), ("data_source.path",),
    ),
    "one tokenizer": ({"data": {"train": BYTES, "validation": BYTES, "tokenizer": BYTES}}, None, ()),
    "an unknown one of two": ({"data": {"train": BYTES, "validation": ""}}, None, ("data.validation",)),
    "two unknown ones": ({"data": {"train": "", "validation": ""}}, None, ("data.train", "data.validation")),
    "an unknown one and data.tokenizer": ({"data": {"train": "", "tokenizer": BYTES}}, None, ("data.train",)),
    "nothing to compare": ({"data": {"train": ""}}, None, ()),
}  # fmt: skip
"""Tokenizers of the sets of a configuration, "" for an unknown one; the keys that are refused, and those of a note."""


def configured(root: Path, tokenizers: Mapping[str, Mapping[str, str]]) -> Config:
    """Return a configuration with one data set for each tokenizer, and a file for data.tokenizer."""
    file = root / "tokenizer.json"
    byte_tokenizer().save(file)
    digests = {BYTES: hashlib.sha256(file.read_bytes()).hexdigest(), "": None}
    tables: dict[str, dict[str, Any]] = {"model": {"vocab_size": VOCAB_SIZE}}
    for section, values in tokenizers.items():
        names_source = section == "data" and "data_source" in tokenizers
        tables[section] = {
            key: str(file)
            if key == "tokenizer"
            else ""
            if names_source and key == "train"
            else write_set(root, f"{section}.{key}", digests.get(name, name))
            for key, name in values.items()
        }
    return make_config(tables)


@pytest.mark.parametrize("case", CASES)
def test_data_of_several_tokenizers_are_refused_or_named(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.planning.plan_text.dry_run", lambda _: "")  # the memory of ranks takes seconds

    tokenizers, refused, named = CASES[case]
    config = configured(tmp_path, tokenizers)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    if refused is None:
        open_reader(config)
    else:
        with pytest.raises(DataError, match=rf"{refused[0]}\b.* {'than those of' if refused[1] else ''}.*{refused[1]}"):
            open_reader(config)
    notes = tokenizer_notes(config)
    assert [[key for key in config_keys(config) if f"{key}=" in note] for note in notes] == (
        [[*named]] if named else []
    )

    assert main(["config", "check", str(file), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert ("Training data: THE RUN WOULD NOT START: " in output) == (refused is not None)
    assert all(note in output for note in notes) or refused is not None


def config_keys(config: Config) -> list[str]:
    return [*config.data_sources, *config.validation_sets]
