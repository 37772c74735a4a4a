"""LayerNorm and RMSNorm, alone and with the residual added, compared with torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.ops.normalization import layer_norm, rms_norm
from tests.helpers.kernels import UNDER_TEST, draw
from tests.helpers.operator_contract import assert_contract, assert_refused, misaligned, with_gaps
from tests.helpers.plain_norms import EPS, eager_rms, plain_add_layer_norm, plain_add_rms, plain_layer_norm
from tests.helpers.relative_error import assert_no_worse_than_eager, assert_same, forward_and_backward

OPS = torch.ops.megatrain

# one row and many; rows within one thread, one warp, one block; rows that fill no pack; rows longer than a block holds
SHAPES = [(1, 1), (3, 7), (5, 3, 16), (2, 2, 2, 10), (33, 768), (5, 1, 4096), (3, 8191), (70, 123)]


def our_rms(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS)[0]


def torch_rms(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def our_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(x, weight, bias, EPS)[0]


def our_add_rms(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Both results in one tensor, so that both get a gradient."""
    return torch.stack(rms_norm(x, weight, EPS, residual))


def our_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.stack(layer_norm(x, weight, bias, EPS, residual))


def drawn_inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Return x, residual, weight and bias, and a gradient for each of two results."""
    x, residual = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    weight, bias = draw(shape[-1], dtype=dtype, seed=2) + 1, draw(shape[-1], dtype=dtype, seed=3)
    return [x, residual, weight, bias], draw(2, *shape, dtype=dtype, seed=4)


@pytest.mark.slow(kept=["shape0", "shape3", "shape4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_are_torchs(shape: tuple[int, ...]) -> None:
    (x, residual, weight, bias), grads = drawn_inputs(shape)

    assert_same(our_rms, torch_rms, [x, weight], grads[0], 1e-11)
    assert_same(our_add_rms, plain_add_rms, [x, residual, weight], grads, 1e-11)
    if shape[-1] == 1:
        return  # LayerNorm of a single number is zero, so only rounding errors remain.
    assert_same(our_layer_norm, plain_layer_norm, [x, weight, bias], grads[0], 1e-10)
    assert_same(our_add_layer_norm, plain_add_layer_norm, [x, residual, weight, bias], grads, 1e-10)


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_rms_norm_of_small_and_large_inputs(scale: float) -> None:
    inputs = [draw(5, 3, 16) * scale, 1 + draw(16, seed=1)]

    assert_same(our_rms, torch_rms, inputs, draw(5, 3, 16, seed=2), 1e-11)


def test_rms_norm_of_zeros_is_finite() -> None:
    zeros = torch.zeros(2, 1, 8, device=UNDER_TEST.device)
    found = forward_and_backward(our_rms, [zeros, torch.ones_like(zeros[0, 0])], torch.ones_like(zeros))

    assert all(torch.isfinite(one).all() for one in found)
    assert torch.equal(found[0], zeros)


def test_layer_norm_far_from_zero_keeps_its_variance() -> None:
    # The mean of squares minus the square of the mean would lose all digits.
    x = draw(4, 512, dtype=torch.float32) + 1000.0

    expected = plain_layer_norm(x.double(), torch.ones_like(x[0]).double(), torch.zeros_like(x[0]).double())
    found = our_layer_norm(x, torch.ones_like(x[0]), torch.zeros_like(x[0]))
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


def test_norm_gradients_are_the_slopes() -> None:
    x, residual = draw(3, 2, 6).requires_grad_(), draw(3, 2, 6, seed=1).requires_grad_()
    weight, bias = draw(6, seed=2).requires_grad_(), draw(6, seed=3).requires_grad_()

    assert torch.autograd.gradcheck(our_rms, [x, weight])
    assert torch.autograd.gradcheck(our_layer_norm, [x, weight, bias])
    assert torch.autograd.gradcheck(our_add_rms, [x, residual, weight])
    assert torch.autograd.gradcheck(our_add_layer_norm, [x, residual, weight, bias])


@pytest.mark.slow(kept=["shape0-dtype0", "shape1-dtype1", "shape1-dtype2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 4, 128), (33, 123), (16, 4096)])
def test_norms_lose_no_more_than_plain_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    (x, residual, weight, bias), grads = drawn_inputs(shape, dtype)

    assert_no_worse_than_eager(our_rms, eager_rms, [x, weight], grads[0])
    assert_no_worse_than_eager(our_layer_norm, plain_layer_norm, [x, weight, bias], grads[0])
    assert_no_worse_than_eager(our_add_rms, plain_add_rms, [x, residual, weight], grads)
    assert_no_worse_than_eager(our_add_layer_norm, plain_add_layer_norm, [x, residual, weight, bias], grads)


def test_rms_norm_in_bf16_is_rounded_once() -> None:
    x, weight = draw(64, 4, 128, dtype=torch.bfloat16), 1 + draw(128, dtype=torch.bfloat16, seed=1)

    # Equal to the rounded result of fp64, except where fp32 arithmetic is on the other side of a tie.
    exact = torch_rms(x.double(), weight.double()).to(torch.bfloat16)
    assert (our_rms(x, weight) != exact).double().mean().item() < 1e-3


@pytest.mark.parametrize("shape", [(64, 4, 128), (5, 8191)])
def test_gradient_past_a_norm_in_bf16_is_rounded_once(shape: tuple[int, ...]) -> None:
    (x, _, weight, bias), grads = drawn_inputs(shape, torch.bfloat16)
    zeros = torch.zeros_like(x)
    for ours, plain, inputs in (
        (our_add_rms, plain_add_rms, [x, zeros, weight]),
        (our_add_layer_norm, plain_add_layer_norm, [x, zeros, weight, bias]),
    ):
        found = forward_and_backward(ours, inputs, grads)[1]
        exact = forward_and_backward(plain, [one.double() for one in inputs], grads.double())[1]
        assert (found != exact.to(torch.bfloat16)).double().mean().item() < 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_of_a_sum_is_the_norm_of_its_rounded_sum(dtype: torch.dtype) -> None:
    (x, residual, weight, bias), _ = drawn_inputs((9, 2, 264), dtype)
    rms, rms_sum = rms_norm(x, weight, EPS, residual)
    layer, layer_sum = layer_norm(x, weight, bias, EPS, residual)

    # Bit by bit: backward keeps the sum, and recomputation must give the same result again.
    assert torch.equal(rms_sum, x + residual)
    assert torch.equal(layer_sum, x + residual)
    assert torch.equal(rms, our_rms(x + residual, weight))
    assert torch.equal(layer, our_layer_norm(x + residual, weight, bias))


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0)])
def test_norms_of_a_permuted_input(order: tuple[int, int, int]) -> None:
    (base, residual, weight, bias), _ = drawn_inputs((6, 6, 6))
    grad = draw(6, 6, 6, seed=3).permute(order)
    grads = torch.stack([grad, grad]).permute(0, 3, 1, 2)

    def keep_strides(operation):
        return lambda base, *rest: operation(base.permute(order), *rest)

    assert not base.permute(order).is_contiguous()
    assert_same(keep_strides(our_rms), keep_strides(torch_rms), [base, weight], grad, 1e-12)
    assert_same(keep_strides(our_layer_norm), keep_strides(plain_layer_norm), [base, weight, bias], grad, 1e-12)
    assert_same(keep_strides(our_add_rms), keep_strides(plain_add_rms), [base, residual, weight], grads, 1e-12)


def test_unused_sum_or_norm_has_no_gradient() -> None:
    (x, residual, weight, _), grads = drawn_inputs((4, 2, 8))
    for used in (0, 1):
        only = torch.zeros_like(grads)
        only[used] = grads[used]
        found = [one.clone().requires_grad_() for one in (x, residual, weight)]
        rms_norm(found[0], found[2], EPS, found[1])[used].backward(grads[used])
        expected = forward_and_backward(plain_add_rms, [x, residual, weight], only)[1:]
        for one, truth in zip(found, expected, strict=True):
            if one.grad is None:
                assert not truth.any()
            else:
                torch.testing.assert_close(one.grad, truth, rtol=1e-11, atol=1e-12)


def test_norm_without_added_sum_rounds_the_gradient_once() -> None:
    (x, _, weight, bias), grads = drawn_inputs((33, 2, 64), torch.bfloat16)
    for norm, parameters in ((rms_norm, (weight,)), (layer_norm, (weight, bias))):
        alone, together = x.clone().requires_grad_(), x.clone().requires_grad_()
        torch.autograd.backward(norm(alone, *parameters, EPS), list(grads))
        zeros = torch.zeros_like(x)
        torch.autograd.backward(norm(together, *parameters, EPS, zeros), list(grads))
        # The same bits as with an addition: recomputation may leave the addition to another operation.
        assert torch.equal(alone.grad, together.grad)
        assert torch.equal(norm(x, *parameters, EPS)[1], x)


@pytest.mark.slow(kept=["shape4-dtype0", "shape4-dtype3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 16)])
def test_norm_operators_keep_the_contract(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    (x, residual, weight, bias), grads = drawn_inputs(shape, dtype)
    _, mean, rstd = OPS.layer_norm(x, weight, bias, EPS)

    assert_contract(OPS.rms_norm.default, x, weight, EPS)
    assert_contract(OPS.add_rms_norm.default, x, residual, weight, EPS)
    assert_contract(OPS.rms_norm_backward.default, grads[0], grads[1], x, weight, rstd)
    assert_contract(OPS.layer_norm.default, x, weight, bias, EPS)
    assert_contract(OPS.add_layer_norm.default, x, residual, weight, bias, EPS)
    assert_contract(OPS.layer_norm_backward.default, grads[0], None, x, weight, mean, rstd)


def test_norms_of_rows_without_elements() -> None:
    (x, residual, weight, bias), grads = drawn_inputs((4, 0))
    out, total, mean, rstd = OPS.add_layer_norm(x, residual, weight, bias, EPS)
    found = OPS.layer_norm_backward(grads[0], grads[1], x, weight, mean, rstd)

    assert [one.shape for one in (out, total, mean, rstd)] == [(4, 0), (4, 0), (4, 1), (4, 1)]
    assert [one.shape for one in found] == [(4, 0), (0,), (0,)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_norm_of_an_input_at_an_odd_address(dtype: torch.dtype) -> None:
    inputs, grads = drawn_inputs((5, 3, 16), dtype)
    x, _, weight, _ = inputs
    _, mean, rstd = OPS.layer_norm(x, weight, inputs[3], EPS)
    for operator, arguments in (
        (OPS.add_layer_norm, [*inputs, EPS]),
        (OPS.layer_norm_backward, [grads[0], grads[1], x, weight, mean, rstd]),
    ):
        expected = operator(*arguments)
        for odd in range(4):
            moved = [misaligned(argument) if number == odd else argument for number, argument in enumerate(arguments)]
            torch.testing.assert_close(operator(*moved), expected)


def test_norms_refuse_wrong_inputs() -> None:
    (x, residual, weight, bias), grads = drawn_inputs((4, 2, 8), torch.float32)
    _, mean, rstd = OPS.layer_norm(x, weight, bias, EPS)
    backward = OPS.layer_norm_backward.default

    assert_refused(OPS.rms_norm.default, (x, weight[:7], EPS), r"weight must have shape \[8\], got \[7\]")
    assert_refused(OPS.rms_norm.default, (x, weight.double(), EPS), "weight must be float32, got float64")
    assert_refused(
        OPS.rms_norm.default, (x.long(), weight.long(), EPS), "x must be bf16, fp16, fp32 or fp64, got int64"
    )
    assert_refused(OPS.rms_norm.default, (x[0, 0, 0], weight, EPS), r"x must have at least one dim, got \[\]")
    assert_refused(OPS.rms_norm.default, (x.transpose(0, 1), weight, EPS), "x must be contiguous")
    assert_refused(
        OPS.rms_norm.default,
        (x.new_empty(0, 1 << 30), weight, EPS),
        r"x must have rows of less than 2\^30 elements, got \[0, 1073741824\]",
    )
    assert_refused(OPS.layer_norm.default, (x, weight, bias[:, None], EPS), r"bias must have shape \[8\], got \[8, 1\]")
    assert_refused(
        OPS.add_rms_norm.default,
        (x, residual[1:], weight, EPS),
        r"residual must have the shape of x, \[4, 2, 8\], got \[3, 2, 8\]",
    )
    assert_refused(
        backward, (grads[0, :3], None, x, weight, mean, rstd), r"grad_out must have the shape of x, \[4, 2, 8\]"
    )
    assert_refused(backward, (grads[0], None, x, weight, mean, rstd.double()), "rstd must be float32, got float64")
    assert_refused(
        backward,
        (grads[0], None, x, weight, mean[1:], rstd),
        r"mean must have one number for each row of x, \[4, 2, 8\], got \[3, 2, 1\]",
    )
    assert_refused(
        backward,
        (grads[0], None, x, weight, mean, rstd[..., 0].contiguous()),
        r"rstd must have one number for each row of x, \[4, 2, 8\], got \[4, 2\]",
    )
    assert_refused(backward, (grads[0], None, x, weight[:7], mean, rstd), r"weight must have shape \[8\], got \[7\]")
    assert_refused(backward, (grads[0].half(), None, x, weight, mean, rstd), "grad_out must be float32, got float16")
    assert_refused(backward, (grads[0], grads[1, 1:], x, weight, mean, rstd), "grad_sum must have the shape of x")
    for number, name in enumerate(("grad_out", "grad_sum", "x", "weight", "mean", "rstd")):
        arguments = [grads[0], grads[1], x, weight, mean, rstd]
        arguments[number] = with_gaps(arguments[number])
        with pytest.raises(RuntimeError, match=f"{name} must be contiguous"):
            OPS.layer_norm_backward(*arguments)
