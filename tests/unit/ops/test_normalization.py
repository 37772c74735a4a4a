"""LayerNorm and RMSNorm against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.ops.normalization import layer_norm, rms_norm
from tests.helpers.relative_error import assert_no_worse_than_eager, assert_same, forward_and_backward

EPS = 1e-5


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def our_rms(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS)


def torch_rms(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def eager_rms(x: Tensor, weight: Tensor) -> Tensor:
    """As model code writes it: statistics in fp32 at least, the product in x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def our_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(x, weight, bias, EPS)


def plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


@pytest.mark.parametrize("shape", [(5, 3, 16), (1, 1, 1), (7, 33), (2, 2, 2, 10)])
def test_rms_norm_is_torchs(shape: tuple[int, ...]) -> None:
    inputs = [draw(*shape), 1 + draw(shape[-1], seed=1)]

    assert_same(our_rms, torch_rms, inputs, draw(*shape, seed=2), 1e-12)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e4])
def test_rms_norm_of_small_and_large_inputs(scale: float) -> None:
    inputs = [draw(5, 3, 16) * scale, 1 + draw(16, seed=1)]

    assert_same(our_rms, torch_rms, inputs, draw(5, 3, 16, seed=2), 1e-11)


def test_rms_norm_of_zeros_is_finite() -> None:
    found = forward_and_backward(our_rms, [torch.zeros(2, 1, 8), torch.ones(8)], torch.ones(2, 1, 8))

    assert all(torch.isfinite(one).all() for one in found)
    assert torch.equal(found[0], torch.zeros(2, 1, 8))


def test_rms_norm_gradients_are_the_slopes() -> None:
    inputs = [draw(3, 2, 6).requires_grad_(), draw(6, seed=1).requires_grad_()]

    assert torch.autograd.gradcheck(our_rms, inputs)


def test_layer_norm_is_the_formula() -> None:
    inputs = [draw(5, 3, 16), 1 + draw(16, seed=1), draw(16, seed=2)]

    assert_same(our_layer_norm, plain_layer_norm, inputs, draw(5, 3, 16, seed=3), 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_lose_no_more_than_plain_torch(dtype: torch.dtype) -> None:
    x, weight, bias = draw(64, 4, 128, dtype=dtype), 1 + draw(128, dtype=dtype, seed=1), draw(128, dtype=dtype, seed=2)
    grad = draw(64, 4, 128, dtype=dtype, seed=3)

    assert_no_worse_than_eager(our_rms, eager_rms, [x, weight], grad)
    assert_no_worse_than_eager(our_layer_norm, plain_layer_norm, [x, weight, bias], grad)


def test_rms_norm_in_bf16_is_rounded_once() -> None:
    x, weight = draw(64, 4, 128, dtype=torch.bfloat16), 1 + draw(128, dtype=torch.bfloat16, seed=1)

    # equal to fp64's result rounded, except where fp32 arithmetic falls on the other side of a tie
    exact = torch_rms(x.double(), weight.double()).to(torch.bfloat16)
    assert (our_rms(x, weight) != exact).double().mean().item() < 1e-3


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0)])
def test_norms_of_a_permuted_input(order: tuple[int, int, int]) -> None:
    x = draw(6, 6, 6).permute(order)
    grad = draw(6, 6, 6, seed=3).permute(order)
    weight, bias = draw(6, seed=1), draw(6, seed=2)

    def keep_strides(operation):
        return lambda base, *rest: operation(base.permute(order), *rest)

    base = draw(6, 6, 6)
    assert not x.is_contiguous()
    assert_same(keep_strides(our_rms), keep_strides(torch_rms), [base, weight], grad, 1e-12)
    assert_same(keep_strides(our_layer_norm), keep_strides(plain_layer_norm), [base, weight, bias], grad, 1e-12)


def test_rms_norm_leaves_its_inputs_alone() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, weight, grad = draw(4, 2, 8, dtype=dtype), draw(8, dtype=dtype, seed=1), draw(4, 2, 8, dtype=dtype, seed=2)
        copies = [one.clone() for one in (x, weight, grad)]
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        our_rms(*leaves).backward(grad)

        assert all(torch.equal(a.detach(), b) for a, b in zip((x, weight, grad), copies, strict=True))
