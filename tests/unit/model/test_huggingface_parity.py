"""Our model against those of transformers on the same random weights: logits, loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.config.model import ModelConfig
from megatrain.model import TokenContext, Transformer
from megatrain.ops.cross_entropy import IGNORED_LABEL
from tests.helpers.huggingface import oracle, our_weights

SIZES: dict[str, Any] = {
    "vocab_size": 83, "seq_len": 24, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "vocab_multiple": 16,
}  # fmt: skip
LLAMA: dict[str, Any] = SIZES | {
    "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "has_bias": False, "has_tied_head": False, "ffn_size": 48,
    "rope_theta": 500.0,
}  # fmt: skip
LLAMA3_SCALING: dict[str, Any] = {"rope_scaling": "llama3", "rope_scaling_factor": 8.0, "rope_original_seq_len": 100}

CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-gqa": LLAMA | {"num_kv_heads": 2},
    "llama-mqa": LLAMA | {"num_kv_heads": 1},
    "llama-tied": LLAMA | {"has_tied_head": True, "num_kv_heads": 2},
    "llama-linear": LLAMA | {"rope_scaling": "linear", "rope_scaling_factor": 4.0},
    "llama-3.1": LLAMA | LLAMA3_SCALING | {"num_kv_heads": 2},
    "llama-wide-heads": LLAMA | {"head_dim": 12, "num_kv_heads": 2, "norm_eps": 1e-3},
    "llama-biases": LLAMA | {"has_bias": True, "num_kv_heads": 2},
    "qwen2": LLAMA | {"has_qkv_bias": True, "num_kv_heads": 2},
    "qwen3": LLAMA | {"qk_norm": "head", "head_dim": 12, "num_kv_heads": 2},
    "qwen3-tied": LLAMA | {"qk_norm": "head", "has_tied_head": True},
    "mistral": LLAMA | {"window_size": 5, "num_kv_heads": 2},
    "gpt2": SIZES,
    "gpt2-untied": SIZES | {"has_tied_head": False, "ffn_size": 40, "norm_eps": 1e-3},
    "gpt2-unpadded": SIZES | {"vocab_multiple": 1},
}


def our_model(model: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype) -> Transformer:
    ours = Transformer(model).to(dtype)
    ours.load_state_dict(weights)
    return ours


def draw_tokens(model: ModelConfig, num_tokens: int) -> Tensor:
    return torch.randint(0, model.vocab_size, (num_tokens + 1, 3), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_tokens", [24, 7, 1])
@pytest.mark.parametrize("case", CASES)
def test_logits_in_fp32(case: str, num_tokens: int) -> None:
    model = ModelConfig(**CASES[case])
    theirs = oracle(model, torch.float32)
    ours = our_model(model, our_weights(theirs.state_dict(), model), torch.float32)
    tokens = draw_tokens(model, num_tokens)[:-1]
    with torch.no_grad():
        expected = theirs(tokens.t()).logits.transpose(0, 1)
        assert ours.loss_head is not None
        context = TokenContext(torch.arange(3), num_tokens)
        found = ours.loss_head.logits(ours.hidden(tokens, context))

    assert found.shape == (num_tokens, 3, model.padded_vocab_size)
    assert expected.std() > 0.5, "weights of this size tell nothing"
    assert (found[..., : model.vocab_size] - expected).abs().max().item() < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_in_fp64(case: str) -> None:
    model = ModelConfig(**CASES[case])
    theirs = oracle(model, torch.float64)
    ours = our_model(model, our_weights(theirs.state_dict(), model), torch.float64)
    tokens = draw_tokens(model, 24)
    labels = tokens[1:].clone()
    labels[3, 1] = labels[5:9, 2] = IGNORED_LABEL

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


def test_every_weight_of_theirs_is_used() -> None:
    for case in ("llama-biases", "qwen2", "qwen3", "gpt2-untied"):
        model = ModelConfig(**CASES[case])
        state = oracle(model, torch.float32).state_dict()
        found = our_weights(state, model)

        num_padding = 2 * (model.padded_vocab_size - model.vocab_size) * model.hidden_size
        num_theirs = sum(one.numel() for name, one in state.items())
        assert sum(one.numel() for one in found.values()) == num_theirs + num_padding
