"""Serial and parallel blocks, with every combination of norm, mlp, bias and positions, compared with the explicit
equations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.config.model import ModelConfig
from megatrain.model import TokenContext, Transformer
from tests.helpers.drawn_parameters import draw_parameters

S, B = 10, 2
Sublayer = Callable[[Tensor, dict[str, Tensor], ModelConfig], Tensor]
MIXTURES = list(itertools.product(["layernorm", "rmsnorm"], ["gelu", "swiglu"], [True, False], ["learned", "rope"]))


def build(**changes: Any) -> tuple[ModelConfig, Transformer]:
    sizes: dict[str, Any] = {
        "vocab_size": 30, "seq_len": S, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "ffn_size": 24, "head_dim": 6, "vocab_multiple": 4,
    }  # fmt: skip
    config = ModelConfig(**(sizes | changes))
    model = Transformer(config).double()
    draw_parameters(model, 0.4)
    return config, model


def plain_norm(x: Tensor, weights: dict[str, Tensor], config: ModelConfig, name: str = "norm") -> Tensor:
    weight = weights[f"{name}.weight"]
    if config.norm == "layernorm":
        return functional.layer_norm(x, x.shape[-1:], weight, weights[f"{name}.bias"], config.norm_eps)
    return functional.rms_norm(x, x.shape[-1:], weight, config.norm_eps)


def turned(x_SBD: Tensor, theta: float) -> Tensor:
    """Rotate each pair by complex multiplication."""
    half = x_SBD.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x_SBD.shape[0], dtype=torch.float64)[:, None, None] * frequency
    pair = torch.complex(x_SBD[..., :half], x_SBD[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pair.real, pair.imag], -1)


def plain_attention(x: Tensor, weights: dict[str, Tensor], config: ModelConfig) -> Tensor:
    """Attention, head by head, with the output bias."""
    heads_a_group = config.num_heads // config.resolved_num_kv_heads
    weight, bias = weights["attention.qkv.weight"], weights.get("attention.qkv.bias")
    causal = torch.ones(S, S).tril().bool()

    def project(group: int, row: int) -> Tensor:
        y = x @ weight[group, row].t()
        return y if bias is None else y + bias[group, row]

    outs = []
    for head in range(config.num_heads):
        group = head // heads_a_group
        q, k, v = (project(group, row) for row in (head % heads_a_group, heads_a_group, heads_a_group + 1))
        if config.positions == "rope":
            q, k = turned(q, config.rope_theta), turned(k, config.rope_theta)
        scores = torch.einsum("sbd,tbd->bst", q, k) / math.sqrt(config.resolved_head_dim)
        outs.append(torch.einsum("bst,tbd->sbd", scores.masked_fill(~causal, -math.inf).softmax(-1), v))
    y = torch.cat(outs, -1) @ weights["attention.out.weight"].t()
    return y + weights["attention_bias"] if config.has_bias else y


def plain_mlp(x: Tensor, weights: dict[str, Tensor], config: ModelConfig) -> Tensor:
    parts = [x @ part.t() for part in weights["mlp.up.weight"]]
    if config.has_bias:
        parts = [part + bias for part, bias in zip(parts, weights["mlp.up.bias"], strict=True)]
    inner = (
        functional.silu(parts[0]) * parts[1] if config.mlp == "swiglu" else functional.gelu(*parts, approximate="tanh")
    )
    y = inner @ weights["mlp.down.weight"].t()
    return y + weights["mlp_bias"] if config.has_bias else y


def plain_branch(x: Tensor, weights: dict[str, Tensor], config: ModelConfig, *sublayers: Sublayer) -> Tensor:
    """The sum of the sublayers, between the norms of the branch."""
    normed = x if config.branch_norm == "output" else plain_norm(x, weights, config)
    first, *others = (sublayer(normed, weights, config) for sublayer in sublayers)
    y = sum(others, first)
    return y if config.branch_norm == "input" else plain_norm(y, weights, config, "output_norm")


def plain_hidden(model: Transformer, tokens: Tensor) -> Tensor:
    """The whole model without its head, by the equations."""
    config, state = model.config, dict(model.named_parameters())

    def below(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): one for name, one in state.items() if name.startswith(prefix)}

    x = state["embedding.word.weight"][tokens]
    if config.positions == "learned":
        x = x + state["embedding.position"][:, None]
    for layer in range(config.num_layers):
        if config.block == "parallel":
            x = x + plain_branch(x, below(f"blocks.{layer}.branch."), config, plain_attention, plain_mlp)
        else:
            x = x + plain_branch(x, below(f"blocks.{layer}.attention_branch."), config, plain_attention)
            x = x + plain_branch(x, below(f"blocks.{layer}.mlp_branch."), config, plain_mlp)
    return x


@pytest.mark.slow(
    kept=[
        "rmsnorm-gelu-False-learned-parallel",
        "rmsnorm-gelu-False-learned-serial",
        "layernorm-swiglu-False-rope-parallel",
        "rmsnorm-gelu-True-learned-parallel",
        "rmsnorm-gelu-True-learned-serial",
        "layernorm-gelu-False-learned-parallel",
    ]
)
@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize(("norm", "mlp", "has_bias", "positions"), MIXTURES)
def test_hidden_states_and_gradients_are_the_equations(
    block: str, norm: str, mlp: str, has_bias: bool, positions: str
) -> None:
    _, model = build(block=block, norm=norm, mlp=mlp, has_bias=has_bias, positions=positions)
    assert_equations(model)


@pytest.mark.parametrize("branch_norm", ["output", "both"])
def test_branch_with_an_output_norm_is_the_equations(branch_norm: str) -> None:
    _, model = build(branch_norm=branch_norm, has_bias=True)
    assert_equations(model)


def assert_equations(model: Transformer) -> None:
    """Compare hidden states and gradients with those of the equations."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 30, (S, B), generator=generator)
    grad = torch.randn(S, B, 16, dtype=torch.float64, generator=generator)
    names = [name for name, _ in model.named_parameters() if not name.startswith("loss_head")]
    parameters = [model.get_parameter(name) for name in names]

    expected = plain_hidden(model, tokens)
    found = model.hidden(tokens, TokenContext(torch.arange(B), S))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    pairs = zip(
        torch.autograd.grad(found, parameters, grad), torch.autograd.grad(expected, parameters, grad), strict=True
    )
    for name, (mine, truth) in zip(names, pairs, strict=True):
        assert (mine - truth).norm().item() <= 1e-11 * truth.norm().item(), name


def test_parallel_block_has_one_norm_and_the_serial_one_two() -> None:
    for block, branches in (("parallel", ["branch"]), ("serial", ["attention_branch", "mlp_branch"])):
        _, model = build(block=block)
        norms = [name for name, _ in model.named_modules() if name.startswith("blocks.0.") and name.endswith(".norm")]

        assert norms == [f"blocks.0.{branch}.norm" for branch in branches]


def test_forward_returns_hidden_states_or_the_loss_sum() -> None:
    _, model = build()
    tokens = torch.randint(0, 30, (S + 1, B), generator=torch.Generator().manual_seed(4))
    context = TokenContext(torch.arange(B), S)
    hidden = model(tokens[:-1], context)
    loss = model(tokens[:-1], context, tokens[1:])

    assert hidden.shape == (S, B, 16)
    assert model.loss_head is not None
    logits = model.loss_head.logits(hidden).detach()[..., :30]
    expected = functional.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten(), reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
