"""A model divided into parts computes, part after part, bitwise the same as the whole, backward included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config.model import ModelConfig
from megatrain.model import ModelPart, TokenContext, Transformer

S, B, LAYERS = 6, 2, 4
STYLES: dict[str, dict[str, Any]] = {
    "gpt": {"dropout": 0.1},
    "gpt-untied": {"has_tied_head": False},
    "llama": {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "has_bias": False, "block": "parallel"},
}
CUTS = [[4], [2, 2], [1, 3], [1, 1, 1, 1], [0, 4, 0]]


def config_of(style: str) -> ModelConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 40, "seq_len": S, "hidden_size": 16, "num_layers": LAYERS, "num_heads": 2, "vocab_multiple": 1,
    }  # fmt: skip
    return ModelConfig(**(sizes | STYLES[style]))


def whole_model(config: ModelConfig) -> Transformer:
    model = Transformer(config, dropout_seed=9)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def parts_of(whole: Transformer, cut: list[int]) -> list[Transformer]:
    firsts = [sum(cut[:number]) for number in range(len(cut))]
    parts = [
        ModelPart(range(first, first + length), has_embedding=number == 0, has_head=number == len(cut) - 1)
        for number, (first, length) in enumerate(zip(firsts, cut, strict=True))
    ]
    models = [Transformer(whole.config, part, dropout_seed=9) for part in parts]
    state = whole.state_dict()
    for model in models:
        model.load_state_dict({name: state[name] for name in model.state_dict()})
    return models


@pytest.mark.slow(
    kept=[
        "[0, 4, 0]-llama",
        "[1, 1, 1, 1]-llama",
        "[1, 1, 1, 1]-gpt-untied",
        "[2, 2]-llama",
        "[2, 2]-gpt-untied",
        "[0, 4, 0]-gpt-untied",
    ]
)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_parts_give_the_loss_and_gradients_of_the_whole(cut: list[int], style: str) -> None:
    config = config_of(style)
    whole = whole_model(config)
    models = parts_of(whole, cut)
    tokens = torch.randint(0, 40, (S + 1, B), generator=torch.Generator().manual_seed(5))
    labels, context = tokens[1:], TokenContext(torch.tensor([3, 8]), S)
    expected = whole(tokens[:-1], context, labels)
    expected.backward()

    x: Tensor = tokens[:-1]
    borders: list[tuple[Tensor, Tensor]] = []
    for number, model in enumerate(models):
        out = model(x, context, labels if number == len(models) - 1 else None)
        x = out.detach().requires_grad_()
        borders.append((out, x))
    loss = borders[-1][0]
    loss.backward()
    for out, x in reversed(borders[:-1]):
        out.backward(x.grad)

    assert torch.equal(loss, expected)
    summed: dict[str, Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            is_tied_head = config.has_tied_head and name == "loss_head.weight"
            key = "embedding.word.weight" if is_tied_head else name
            summed[key] = summed[key] + parameter.grad if key in summed else parameter.grad
    expected_gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert summed.keys() == expected_gradients.keys()
    for name, grad in summed.items():
        assert torch.equal(grad, expected_gradients[name]), name


def test_layers_keep_their_names() -> None:
    config = config_of("gpt-untied")
    part = Transformer(config, ModelPart(range(2, 4), has_embedding=False, has_head=False))

    assert {name.split(".")[1] for name, _ in part.named_parameters()} == {"2", "3"}
    assert part.embedding is None
    assert part.loss_head is None


def test_tied_head_alone_has_a_parameter_of_its_own() -> None:
    config = config_of("gpt")
    last = Transformer(config, ModelPart(range(3, 4), has_embedding=False, has_head=True))

    assert last.loss_head is not None
    assert last.loss_head.weight.shape == (40, 16)
    assert "loss_head.weight" in dict(last.named_parameters())


def test_part_without_head_returns_hidden_states_with_labels() -> None:
    config = config_of("gpt")
    first = Transformer(config, ModelPart(range(2), has_embedding=True, has_head=False))
    for parameter in first.parameters():
        torch.nn.init.zeros_(parameter)
    tokens = torch.zeros(S, B, dtype=torch.int64)

    assert first(tokens, TokenContext(torch.arange(B), S), tokens).shape == (S, B, 16)
