"""gelu and swiglu, with and without the bias before them, compared with torch's own."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.ops.activation import bias_gelu, bias_swiglu
from tests.helpers.kernels import draw, on_device
from tests.helpers.operator_contract import assert_contract, assert_refused, misaligned, with_gaps
from tests.helpers.relative_error import assert_no_worse_than_eager, assert_same, forward_and_backward

OPS = torch.ops.megatrain

# one row and many; columns within a warp, a block, and over several; columns that fill no pack; several rounds of rows
SHAPES = [(1, 1), (3, 7), (5, 3, 16), (2, 2, 2, 10), (2, 8191), (70, 123), (5, 2056), (300, 8)]


def plain_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    x = x if bias is None else x + bias
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))))


def plain_swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    gate, up = (x if bias is None else x + bias).unbind(-2)
    return functional.silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    return bias_gelu(x, None)


def swiglu(x: Tensor) -> Tensor:
    return bias_swiglu(x, None)


def drawn_inputs(
    shape: tuple[int, ...], num_parts: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x and bias of gelu (1 part) or swiglu (2), and a gradient of the result, which has `shape`."""
    parts = () if num_parts == 1 else (2,)
    x = draw(*shape[:-1], *parts, shape[-1], dtype=dtype, scale=3)
    return x, draw(*parts, shape[-1], dtype=dtype, seed=1), draw(*shape, dtype=dtype, seed=2)


@pytest.mark.slow(kept=["shape0", "shape3", "shape5"])
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_their_formulas(shape: tuple[int, ...]) -> None:
    x, bias, grad = drawn_inputs(shape, 1)
    assert_same(gelu, plain_gelu, [x], grad, 1e-12)
    assert_same(bias_gelu, plain_gelu, [x, bias], grad, 1e-12)

    x, bias, grad = drawn_inputs(shape, 2)
    assert_same(swiglu, plain_swiglu, [x], grad, 1e-12)
    assert_same(bias_swiglu, plain_swiglu, [x, bias], grad, 1e-12)


def test_activation_gradients_are_the_slopes() -> None:
    for operation, plain, num_parts in ((bias_gelu, gelu, 1), (bias_swiglu, swiglu, 2)):
        x, bias, _ = drawn_inputs((3, 2, 5), num_parts)
        assert torch.autograd.gradcheck(operation, [x.requires_grad_(), bias.requires_grad_()])
        assert torch.autograd.gradcheck(plain, [x])


@pytest.mark.slow(kept=["shape0-dtype0", "shape1-dtype2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 2, 128), (33, 123)])
def test_activations_lose_no_more_than_plain_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def eager_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.gelu(x if bias is None else x + bias, approximate="tanh")

    x, bias, grad = drawn_inputs(shape, 1, dtype)
    assert_no_worse_than_eager(gelu, eager_gelu, [x], grad)
    assert_no_worse_than_eager(bias_gelu, eager_gelu, [x, bias], grad)
    x, bias, grad = drawn_inputs(shape, 2, dtype)
    assert_no_worse_than_eager(swiglu, plain_swiglu, [x], grad)
    assert_no_worse_than_eager(bias_swiglu, plain_swiglu, [x, bias], grad)


def test_bias_is_not_rounded_before_the_activation() -> None:
    x, bias, _ = drawn_inputs((64, 4, 128), 1, torch.bfloat16)

    # Equal to the rounded result of fp64, except where fp32 arithmetic is on the other side of a tie.
    exact = plain_gelu(x.double(), bias.double()).to(torch.bfloat16)
    is_far = x.double() + bias.double() < -2  # 1 + tanh cancels there, in torch's own too.
    assert ((bias_gelu(x, bias) != exact) & ~is_far).double().mean().item() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_extreme_inputs_are_finite(dtype: torch.dtype) -> None:
    def gradients(operation, x: Tensor) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        out = operation(leaf)
        out.sum().backward()
        return [out.detach(), leaf.grad]

    values = torch.tensor([-1e4, -90.0, 0.0, 90.0, 1e4], dtype=dtype)
    gate = on_device(values.repeat_interleave(4))
    for x, operation, plain in (
        (gate, gelu, lambda x: functional.gelu(x, approximate="tanh")),
        (torch.stack([gate, torch.ones_like(gate)]), swiglu, plain_swiglu),
    ):
        for found, expected in zip(gradients(operation, x), gradients(plain, x.double()), strict=True):
            assert torch.isfinite(found).all(), found
            torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-6)


def test_strided_inputs_and_gradients() -> None:
    base, bias, grad = draw(2, 5, 7, 3), draw(2, 3, seed=1), draw(7, 5, 3, seed=2).transpose(0, 1)

    def permuted(operation):
        return lambda x, bias: operation(x.permute(1, 2, 0, 3), bias)

    def of_gate(operation):
        return lambda x, bias: operation(x.permute(1, 2, 0, 3)[..., 0, :], bias)

    assert not base.permute(1, 2, 0, 3).is_contiguous()
    assert_same(permuted(bias_swiglu), permuted(plain_swiglu), [base, bias], grad, 1e-12)
    assert_same(of_gate(bias_gelu), of_gate(plain_gelu), [base, bias[0]], grad, 1e-12)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_results_and_gradients_in_bf16_are_rounded_once(num_parts: int) -> None:
    operation, plain = ((bias_gelu, plain_gelu), (bias_swiglu, plain_swiglu))[num_parts - 1]
    x, bias, grad = drawn_inputs((80, 512), num_parts, torch.bfloat16)
    found = forward_and_backward(operation, [x, bias], grad)
    exact = forward_and_backward(plain, [x.double(), bias.double()], grad.double())
    for mine, truth in zip(found, exact, strict=True):
        is_large = truth.abs() > 0.05  # Values that cancel to less have lost digits of fp32 before they are rounded.
        assert (mine != truth.to(torch.bfloat16))[is_large].double().mean().item() < 1e-2


@pytest.mark.parametrize("num_parts", [1, 2])
def test_activations_save_their_input_and_nothing_else(num_parts: int) -> None:
    operation = bias_gelu if num_parts == 1 else bias_swiglu
    saved: list[tuple[int, ...]] = []
    x, bias, _ = drawn_inputs((4, 2, 8), num_parts)
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(tuple(one.shape)) or one, lambda one: one):
        out = operation(x, bias)
    alive = weakref.ref(out)
    total = out.sum()
    del out

    assert saved == [tuple(x.shape), tuple(bias.shape)]
    assert alive() is None
    total.backward()


@pytest.mark.slow(kept=["shape3-dtype0", "shape3-dtype3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3, 16), (70, 123), (5, 2056), (300, 8), (0, 16), (4, 0)])
def test_activation_operators_keep_the_contract(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, bias, grad = drawn_inputs(shape, 1, dtype)
    assert_contract(OPS.bias_gelu.default, x, None)
    assert_contract(OPS.bias_gelu.default, x, bias)
    assert_contract(OPS.gelu_backward.default, grad, x)
    assert_contract(OPS.bias_gelu_backward.default, grad, x, bias)

    x, bias, grad = drawn_inputs(shape, 2, dtype)
    assert_contract(OPS.bias_swiglu.default, x, None)
    assert_contract(OPS.bias_swiglu.default, x, bias)
    assert_contract(OPS.swiglu_backward.default, grad, x)
    assert_contract(OPS.bias_swiglu_backward.default, grad, x, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_activation_of_an_input_at_an_odd_address(dtype: torch.dtype) -> None:
    for num_parts, forward, backward in (
        (1, OPS.bias_gelu, OPS.bias_gelu_backward),
        (2, OPS.bias_swiglu, OPS.bias_swiglu_backward),
    ):
        x, bias, grad = drawn_inputs((5, 3, 16), num_parts, dtype)
        expected, expected_grads = forward(x, bias), backward(grad, x, bias)
        for odd_x, odd_bias in ((misaligned(x), bias), (x, misaligned(bias))):
            torch.testing.assert_close(forward(odd_x, odd_bias), expected)
            torch.testing.assert_close(backward(grad, odd_x, odd_bias), expected_grads)
        torch.testing.assert_close(backward(misaligned(grad), x, bias), expected_grads)


def test_activations_refuse_wrong_inputs() -> None:
    x, bias, grad = drawn_inputs((4, 2, 8), 1, torch.float32)
    forward, backward = OPS.bias_gelu.default, OPS.bias_gelu_backward.default
    assert_refused(forward, (x, bias[:7]), r"bias must have shape \[8\], got \[7\]")
    assert_refused(forward, (x, bias.double()), "bias must be float32, got float64")
    assert_refused(forward, (x.long(), None), "x must be bf16, fp16, fp32 or fp64, got int64")
    assert_refused(forward, (x[0, 0, 0], None), r"x must have at least one dim, got \[\]")
    assert_refused(forward, (x.transpose(0, 1), bias), "x must be contiguous")
    assert_refused(backward, (grad[1:], x, bias), r"grad_out must have shape \[4, 2, 8\], got \[3, 2, 8\]")
    assert_refused(backward, (grad.half(), x, bias), "grad_out must be float32, got float16")
    assert_refused(backward, (grad, x, bias[:7]), r"bias must have shape \[8\], got \[7\]")
    with pytest.raises(RuntimeError, match="grad_out must be contiguous"):
        OPS.gelu_backward(with_gaps(grad), x)
    assert_refused(OPS.gelu_backward.default, (grad.transpose(0, 1), x), r"grad_out must have shape \[4, 2, 8\]")

    x, bias, grad = drawn_inputs((4, 2, 8), 2, torch.float32)
    forward, backward = OPS.bias_swiglu.default, OPS.bias_swiglu_backward.default
    assert_refused(forward, (x[..., :1, :].contiguous(), None), r"x must have shape \[..., 2, F\], got \[4, 2, 1, 8\]")
    assert_refused(forward, (x, bias[0]), r"bias must have shape \[2, 8\], got \[8\]")
    assert_refused(forward, (x, bias.t().contiguous().t()), "bias must be contiguous")
    assert_refused(backward, (x, x, bias), r"grad_out must have shape \[4, 2, 8\], got \[4, 2, 2, 8\]")
