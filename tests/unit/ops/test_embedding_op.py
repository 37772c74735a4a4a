"""The embedding's gradient against an fp64 sum, for tokens that occur once and thousands of times."""

from __future__ import annotations

import pytest
import torch

from megatrain.ops.embedding import embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_forward_takes_rows(dtype: torch.dtype) -> None:
    weight = torch.randn(7, 3, dtype=torch.float64).to(dtype)
    tokens = torch.tensor([[1, 6], [0, 1]])
    assert torch.equal(embedding(tokens, weight), weight[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_of_a_frequent_token_is_summed_in_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.zeros(3000, 1, dtype=torch.int64)
    tokens[1500] = 2
    weight = torch.randn(4, 8, generator=generator).to(dtype).requires_grad_()
    grad = (torch.randn(3000, 1, 8, generator=generator) + 1.0).to(dtype)
    embedding(tokens, weight).backward(grad)
    expected = torch.zeros(4, 8, dtype=torch.float64).index_add_(0, tokens[:, 0], grad[:, 0].double())
    assert weight.grad is not None
    # one rounding to the type: half a unit in the last place, plus fp32's share
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    assert torch.allclose(weight.grad.double(), expected, rtol=rounding, atol=0.0)
