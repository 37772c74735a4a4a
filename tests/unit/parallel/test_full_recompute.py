"""Full recompute: the same loss and gradients bit by bit, dropout included, and only block inputs are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatrain.ops.normalization import ResidualStream
from megatrain.parallel.recompute import recompute_fully
from tests.helpers.single_rank import gradients_by_name, make_config, random_tokens, run_gradients, single_rank_model

STYLES: dict[str, dict[str, Any]] = {
    "gpt": {"dropout": 0.2},
    "llama": {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "has_bias": False, "num_kv_heads": 2},
    "parallel": {"block": "parallel", "dropout": 0.2, "window_size": 3},
}


@pytest.mark.slow(kept=["gpt-full-bf16", "llama-full-fp64", "llama-selective-bf16", "parallel-selective-fp64"])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("style", STYLES)
def test_recompute_changes_no_bit_of_loss_and_gradients(style: str, recompute: str, precision: str) -> None:
    found: list[tuple[float, dict[str, Tensor]]] = []
    for kind in ("none", recompute):
        config = make_config(
            model=STYLES[style], parallel={"recompute": kind}, train={"steps": 1, "precision": precision, "seed": 3}
        )
        rank_model = single_rank_model(config)
        loss = run_gradients(rank_model, random_tokens(config, 0), first_sample=12)
        found.append((loss, gradients_by_name(rank_model)))

    (loss, gradients), (other_loss, other_gradients) = found
    assert loss == other_loss
    for name, gradient in gradients.items():
        assert gradient.any(), name
        assert torch.equal(gradient, other_gradients[name]), name


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
        self.num_calls = 0

    def forward(self, stream: ResidualStream, shift: float) -> ResidualStream:
        self.num_calls += 1
        x = stream.total()
        return ResidualStream(x, torch.tanh(x @ self.weight + shift).exp())


def test_block_runs_again_in_backward_and_keeps_its_input_only() -> None:
    block = Inner()
    recompute_fully(block)
    kept: list[tuple[int, ...]] = []
    x = torch.ones(3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(tuple(one.shape)) or one, lambda one: one):
        out, rest = block(ResidualStream(x), 0.5)
    assert rest is None, "two tensors would be kept for the next block"
    assert block.num_calls == 1
    assert all(shape == (3, 4) or shape == (0,) for shape in kept)
    assert len([shape for shape in kept if shape == (3, 4)]) <= 1
    out.sum().backward()

    assert block.num_calls == 2
    plain = Inner()
    y = torch.ones(3, 4, requires_grad=True)
    plain(ResidualStream(y), 0.5).total().sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(block.weight.grad, plain.weight.grad)


def test_without_gradients_nothing_runs_twice() -> None:
    block = Inner()
    recompute_fully(block)
    with torch.no_grad():
        block(ResidualStream(torch.ones(3, 4)), 0.5)

    assert block.num_calls == 1
