"""gelu and swiglu against torch's own."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.ops.activation import gelu, swiglu
from tests.helpers.relative_error import assert_no_worse_than_eager, assert_same


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def plain_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))))


def plain_swiglu(x: Tensor) -> Tensor:
    return functional.silu(x[..., 0, :]) * x[..., 1, :]


def test_gelu_is_the_tanh_formula() -> None:
    assert_same(gelu, plain_gelu, [draw(6, 2, 16)], draw(6, 2, 16, seed=1), 1e-12)


def test_swiglu_is_silu_of_gate_times_up() -> None:
    assert_same(swiglu, plain_swiglu, [draw(6, 2, 2, 16)], draw(6, 2, 16, seed=1), 1e-12)


def test_swiglu_gradients_are_the_slopes() -> None:
    assert torch.autograd.gradcheck(swiglu, [draw(3, 2, 2, 5).requires_grad_()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_lose_no_more_than_plain_torch(dtype: torch.dtype) -> None:
    grad = draw(64, 2, 128, dtype=dtype, seed=1)

    assert_no_worse_than_eager(
        gelu, lambda x: functional.gelu(x, approximate="tanh"), [draw(64, 2, 128, dtype=dtype)], grad
    )
    assert_no_worse_than_eager(swiglu, plain_swiglu, [draw(64, 2, 2, 128, dtype=dtype)], grad)


@pytest.mark.parametrize("value", [-1e4, -90.0, 0.0, 90.0, 1e4])
def test_swiglu_of_extreme_gates(value: float) -> None:
    x = torch.stack([torch.full((4,), value), torch.ones(4)])[None, None].requires_grad_()
    swiglu(x).sum().backward()

    expected = x.detach().clone().requires_grad_()
    plain_swiglu(expected).sum().backward()
    assert torch.isfinite(x.grad).all()
    torch.testing.assert_close(x.grad, expected.grad)


def test_swiglu_of_strided_input_and_gradient() -> None:
    base, grad = draw(2, 5, 7, 3), draw(7, 5, 3, seed=1).transpose(0, 1)

    def strided(operation):
        return lambda x: operation(x.permute(1, 2, 0, 3))

    assert not base.permute(1, 2, 0, 3).is_contiguous()
    assert_same(strided(swiglu), strided(plain_swiglu), [base], grad, 1e-12)


def test_swiglu_leaves_its_inputs_alone() -> None:
    x, grad = draw(4, 2, 2, 8).requires_grad_(), draw(4, 2, 8, seed=1)
    x_before, grad_before = x.detach().clone(), grad.clone()
    swiglu(x).backward(grad)

    assert torch.equal(x.detach(), x_before)
    assert torch.equal(grad, grad_before)


def test_swiglu_saves_its_input_and_nothing_else() -> None:
    saved: list[tuple[int, ...]] = []
    x = draw(4, 2, 2, 8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(tuple(one.shape)) or one, lambda one: one):
        out = swiglu(x)
    alive = weakref.ref(out)
    total = out.sum()
    del out

    assert saved == [(4, 2, 2, 8)]
    assert alive() is None
    total.backward()
