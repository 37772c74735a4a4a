"""`megatrain.load` on a Hugging Face directory: the logits of transformers, and text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.contracts.errors import CheckpointError, DataError
from megatrain.inference.loaded_model import load
from tests.helpers.hf_models import (
    CASES,
    assert_same_logits,
    export,
    our_logits,
    random_parameters,
    some_tokens,
    their_logits,
    tiny,
)
from tests.helpers.require import lazy_module

transformers = lazy_module("transformers")


@pytest.mark.slow(kept=["gpt2"])
@pytest.mark.parametrize("case", ["llama-tied", "gpt2"])
def test_logits_are_those_of_the_parameters(case: str, tmp_path: Path) -> None:
    model, tokens_SB = tiny(case, dropout=0.0), some_tokens(tiny(case))
    parameters = random_parameters(model)
    loaded = load(export(parameters, model, tmp_path / "exported"), device="cpu")

    assert torch.equal(loaded.logits(tokens_SB.t()), our_logits(parameters, model, tokens_SB))
    assert (loaded.step, loaded.config.vocab_size) == (0, model.vocab_size)
    with pytest.raises(DataError, match=r"has neither tokenizer\.json nor tokenizer\.model; copy its"):
        loaded.generate("a")
    with pytest.raises(CheckpointError, match="step=3: a Hugging Face directory has neither steps nor"):
        load(tmp_path / "exported", step=3)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model, tokens_SB = tiny(case), some_tokens(tiny(case))
    place = export(random_parameters(model), model, tmp_path / "exported")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place).eval()

    loaded = load(place, device="cpu")
    tokens_SB = tokens_SB[: loaded.config.seq_len]
    assert_same_logits(loaded.logits(tokens_SB.t()), their_logits(theirs, tokens_SB))
