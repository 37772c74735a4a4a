"""Export, import, export again: the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.data.tokenizer import load_tokenizer, train_tokenizer
from megatrain.hf import TokenizerFile, export_model, open_model
from tests.helpers.hf_models import CASES, export, file_contents, random_parameters, tiny
from tests.helpers.require import require_module

require_module("safetensors")
require_module("tokenizers")


WHOLE = [case for case in CASES if case != "llama-dynamic"]
"""All except llama-dynamic, whose files do not contain seq_len."""


QUICK = ("llama-3.1", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "phi3", "neox", "gpt2")


@pytest.mark.slow(kept=[f"{case}-bf16" for case in QUICK])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", WHOLE)
def test_the_second_export_is_bitwise_the_first(case: str, dtype: Any, tmp_path: Path) -> None:
    model = tiny(case, init_std=0.013, vocab_size=300, dropout=0.1 if case.startswith("gpt2") else 0.0)
    parameters = random_parameters(model)
    if dtype == "bf16":
        parameters = {name: parameter.to(torch.bfloat16).float() for name, parameter in parameters.items()}
    train_tokenizer(["to be or not to be"], 270).save(tmp_path / "tokenizer.json")

    def write(parameters: dict[str, torch.Tensor], model: Any, tokenizer: Path, name: str) -> dict[str, bytes]:
        export_model(
            parameters.__getitem__, model, tmp_path / name, dtype=dtype, max_shard_bytes=30_000,
            tokenizer=TokenizerFile(tokenizer.read_bytes(), str(tokenizer), load_tokenizer(tokenizer).eod_id),
        )  # fmt: skip
        return file_contents(tmp_path / name)

    first = write(parameters, model, tmp_path / "tokenizer.json", "first")
    opened = open_model(tmp_path / "first")
    assert opened.tokenizer is not None
    imported = dict(opened.parameters())
    second = write(imported, opened.model, opened.tokenizer, "second")

    assert "model.safetensors.index.json" in first
    assert first.keys() == second.keys()
    assert all(first[name] == second[name] for name in first)
    for name, one in imported.items():
        # all rows except those that pad the vocabulary, whose number differs between the two models
        num_rows = model.vocab_size if name in ("embedding.word.weight", "loss_head.weight") else None
        assert torch.equal(one[:num_rows], parameters[name][:num_rows]), name
        assert num_rows is None or not one[num_rows:].any()


@pytest.mark.parametrize(("case", "changes"), [("llama", {"dropout": 0.5}), ("gpt2", {"has_bias": False})])
def test_round_trip_without_keys_that_the_family_lacks(case: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny(case, **changes)

    export(random_parameters(model), model, tmp_path / "first")
    opened = open_model(tmp_path / "first")
    export(dict(opened.parameters()), opened.model, tmp_path / "second")

    assert file_contents(tmp_path / "first") == file_contents(tmp_path / "second")
