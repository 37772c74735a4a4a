"""Dropout: what survives is scaled, what is dropped gets no gradient, and no mask is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.ops.dropout import dropout
from megatrain.rng import derive_key, keep_mask

KEY = derive_key("dropout", 1, "embedding")
TOKENS = torch.arange(12)[:, None] + torch.tensor([0, 12])[None]


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_elements_are_dropped_or_scaled(probability: float, dtype: torch.dtype) -> None:
    x = draw(12, 2, 16, dtype=dtype).requires_grad_()
    grad = draw(12, 2, 16, dtype=dtype, seed=1)
    out = dropout(x, probability, KEY, TOKENS)
    out.backward(grad)

    mask = keep_mask(KEY, probability, TOKENS, 16)
    assert 0 < mask.sum() < mask.numel()
    assert out.dtype == dtype
    torch.testing.assert_close(out.detach(), torch.where(mask, x.detach() / (1 - probability), 0).to(dtype))
    torch.testing.assert_close(x.grad, torch.where(mask, grad / (1 - probability), 0).to(dtype))


def test_gradient_is_the_slope() -> None:
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.3, KEY, TOKENS), [draw(12, 2, 3).requires_grad_()])


def test_mean_is_kept() -> None:
    tokens = torch.arange(256)[:, None]
    out = dropout(torch.ones(256, 1, 256, dtype=torch.float64), 0.3, KEY, tokens)

    assert out.mean().item() == pytest.approx(1.0, abs=4 * (0.3 / 0.7) ** 0.5 / 256)


def test_only_token_numbers_are_kept_for_backward() -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        dropout(draw(12, 2, 16).requires_grad_(), 0.3, KEY, TOKENS)

    assert [one.shape for one in saved] == [TOKENS.shape]
