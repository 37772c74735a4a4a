"""megatrain's models compared with those of transformers with the same random weights: logits, loss and every
gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.config.model import ModelConfig
from megatrain.contracts.labels import IGNORED_LABEL
from megatrain.model import TokenContext, Transformer
from tests.helpers.hf_models import CASES, tiny
from tests.helpers.huggingface import WideFloats, oracle, our_weights

KEPT = ["llama-3.1", "qwen2", "qwen3-uneven", "gemma2", "gemma3", "olmo2", "phi3", "neox", "gpt2"]


def our_model(model: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype) -> Transformer:
    ours = Transformer(model).to(dtype)
    ours.load_state_dict(weights)
    return ours


def draw_tokens(model: ModelConfig, num_tokens: int) -> Tensor:
    return torch.randint(0, model.vocab_size, (num_tokens + 1, 3), generator=torch.Generator().manual_seed(1))


# whole directories: test_hf_import.py
@pytest.mark.slow(kept=["gemma3-7"])
@pytest.mark.parametrize("num_tokens", [7, 1])
@pytest.mark.parametrize("case", CASES)
def test_logits_of_shorter_samples_in_fp32(case: str, num_tokens: int) -> None:
    model = tiny(case)
    theirs = oracle(model, torch.float32)
    ours = our_model(model, our_weights(theirs.state_dict(), model), torch.float32)
    tokens = draw_tokens(model, num_tokens)[:-1]
    with torch.no_grad():
        expected = theirs(tokens.t()).logits.transpose(0, 1)
        assert ours.loss_head is not None
        context = TokenContext(torch.arange(3), num_tokens)
        found = ours.loss_head.logits(ours.hidden(tokens, context))

    assert found.shape == (num_tokens, 3, model.padded_vocab_size)
    assert expected.std() > 0.5, "weights of this size show nothing"
    assert (found[..., : model.vocab_size] - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.slow(kept=KEPT)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_in_fp64(case: str) -> None:
    model = tiny(case)
    with WideFloats():
        theirs = oracle(model, torch.float64)
    ours = our_model(model, our_weights(theirs.state_dict(), model), torch.float64)
    tokens = draw_tokens(model, 24)
    labels = tokens[1:].clone()
    labels[3, 1] = labels[5:9, 2] = IGNORED_LABEL

    with WideFloats():
        logits = theirs(tokens[:-1].t()).logits
    expected = functional.cross_entropy(
        logits.transpose(0, 1).flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    expected.backward()
    found = ours(tokens[:-1], TokenContext(torch.arange(3), 24), labels)
    found.backward()

    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(expected.item(), rel=1e-8)
    their_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected_gradients = our_weights({name: grad for name, grad in their_gradients.items() if grad is not None}, model)
    our_gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert our_gradients.keys() <= expected_gradients.keys()
    for name, grad in our_gradients.items():
        truth = expected_gradients[name]
        assert grad is not None, name
        assert truth.abs().max() > 0, name
        assert (grad - truth).norm().item() <= 1e-8 * truth.norm().item(), name
