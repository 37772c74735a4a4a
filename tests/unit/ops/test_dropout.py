"""Dropout: exactly the mask of megatrain.rng, survivors scaled, bias before and residual after, and no mask kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.ops.dropout import dropout, residual_dropout
from megatrain.rng import derive_key, keep_mask
from tests.helpers.kernels import UNDER_TEST, draw, on_device
from tests.helpers.operator_contract import assert_contract, assert_refused, misaligned, with_gaps
from tests.helpers.relative_error import assert_no_worse_than_eager, assert_same

KEY = derive_key("dropout", 1, "embedding")
OPS = torch.ops.megatrain
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]

# one row and many; columns within a warp, a block, and over several; columns that fill no pack; several rounds of rows
SHAPES = [(1, 1), (3, 7), (5, 3, 16), (2, 2, 2, 10), (2, 8191), (70, 123), (5, 2056), (300, 8)]


def tokens_of(shape: tuple[int, ...]) -> Tensor:
    """Return a number for each row of `shape`: far apart, large, not in order."""
    numbers = torch.randint(0, 1 << 50, shape[:-1], generator=torch.Generator().manual_seed(5))
    return on_device(numbers)


def masked(x: Tensor, probability: float, token: Tensor) -> Tensor:
    return torch.where(keep_mask(KEY, probability, token, x.shape[-1]), x / (1 - probability), 0.0)


def ours(probability: float, token: Tensor | None):
    return lambda x, y, bias: residual_dropout(x, y, bias, probability, KEY, token)


def plain(probability: float, token: Tensor | None):
    if token is None:
        return lambda x, y, bias: x + (y + bias)
    return lambda x, y, bias: x + masked(y + bias, probability, token)


def drawn_inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Return x, y and bias, and a gradient of the result."""
    x, y, grad = (draw(*shape, dtype=dtype, seed=seed) for seed in range(3))
    return [x, y, draw(shape[-1], dtype=dtype, seed=3)], grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_is_that_of_the_random_numbers(dtype: torch.dtype) -> None:
    for hidden_size in (1, 7, 16, 123, 2056, 8191):
        shape = (5, 3, hidden_size) if hidden_size < 2000 else (2, 2, hidden_size)
        token = tokens_of(shape)
        ones = torch.ones(shape, dtype=dtype, device=UNDER_TEST.device)
        for probability in (0.0, 1e-9, 0.1, 0.5, 0.999, 1 - 1e-12):
            found = OPS.residual_dropout(None, ones, None, token, probability, *KEY)
            expected = keep_mask(KEY, probability, token, hidden_size)
            assert torch.equal(found != 0, expected), (hidden_size, probability)


def test_mask_of_every_token_number_and_key() -> None:
    ones = torch.ones(7, 2, 40, device=UNDER_TEST.device)
    for first in (0, -1, 1 << 62, -(1 << 63)):
        token = on_device(torch.arange(7)[:, None] + torch.tensor([first, 3]))
        for key in ((0, 0), (-1, 1), (1 << 62, -(1 << 63)), derive_key("dropout", 2, "x")):
            assert torch.equal(dropout(ones, 0.4, key, token) != 0, keep_mask(key, 0.4, token, 40)), (first, key)


def test_mask_at_the_very_threshold() -> None:
    """Random numbers have 32 bits: a number equal to the threshold is kept; a probability between two thresholds is
    rounded."""
    token = on_device(torch.tensor([[3]]))
    ones = torch.ones(1, 1, 8, device=UNDER_TEST.device)
    low, high = 0, 1 << 32
    while high - low > 1:  # The draw of unit 5 is the largest threshold at which it is kept.
        middle = (low + high) // 2
        low, high = (middle, high) if keep_mask(KEY, middle / 2**32, token, 8)[0, 0, 5] else (low, middle)
    for threshold, is_kept in ((low, True), (low + 0.4, True), (low + 0.6, False), (low + 1, False)):
        assert bool(dropout(ones, threshold / 2**32, KEY, token)[0, 0, 5]) == is_kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_elements_are_dropped_or_scaled(probability: float, dtype: torch.dtype) -> None:
    x, grad = draw(12, 2, 16, dtype=dtype).requires_grad_(), draw(12, 2, 16, dtype=dtype, seed=1)
    token = tokens_of((12, 2, 16))
    out = dropout(x, probability, KEY, token)
    out.backward(grad)

    mask = keep_mask(KEY, probability, token, 16)
    assert 0 < mask.sum() < mask.numel()
    assert out.dtype == dtype
    torch.testing.assert_close(out.detach(), torch.where(mask, x.detach() / (1 - probability), 0).to(dtype))
    torch.testing.assert_close(x.grad, torch.where(mask, grad / (1 - probability), 0).to(dtype))


@pytest.mark.slow(kept=["shape0", "shape3", "shape5"])
@pytest.mark.parametrize("shape", SHAPES)
def test_residual_dropout_is_the_sum_of_its_parts(shape: tuple[int, ...]) -> None:
    (x, y, bias), grad = drawn_inputs(shape)
    token = tokens_of(shape)

    for probability, numbers in ((0.3, token), (0.0, None)):
        ours_here, plain_here = ours(probability, numbers), plain(probability, numbers)
        assert_same(ours_here, plain_here, [x, y, bias], grad, 1e-12)
        zero = torch.zeros_like(bias)
        assert_same(
            lambda x, y, of=ours_here: of(x, y, None),
            lambda x, y, of=plain_here, b=zero: of(x, y, b),
            [x, y],
            grad,
            1e-12,
        )
    assert_same(lambda y: dropout(y, 0.3, KEY, token), lambda y: masked(y, 0.3, token), [y], grad, 1e-12)


def test_dropout_gradients_are_the_slopes() -> None:
    inputs = [one.requires_grad_() for one in drawn_inputs((5, 2, 3))[0]]
    token = tokens_of((5, 2, 3))

    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.3, KEY, token), inputs[:1])
    assert torch.autograd.gradcheck(ours(0.3, token), inputs)
    assert torch.autograd.gradcheck(ours(0.0, None), inputs)


@pytest.mark.slow(kept=["shape0-dtype0", "shape1-dtype2"])
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("shape", [(64, 4, 128), (33, 123)])
def test_residual_dropout_loses_no_more_than_plain_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs, grad = drawn_inputs(shape, dtype)
    token = tokens_of(shape)

    assert_no_worse_than_eager(ours(0.1, token), plain(0.1, token), inputs, grad)
    assert_no_worse_than_eager(ours(0.0, None), plain(0.0, None), inputs, grad)


def test_residual_dropout_is_rounded_once() -> None:
    (x, y, bias), _ = drawn_inputs((64, 4, 128), torch.bfloat16)
    exact = (x.double() + y.double() + bias.double()).to(torch.bfloat16)

    assert (residual_dropout(x, y, bias, 0.0, KEY, None) != exact).double().mean().item() < 1e-3


def test_dropped_infinities_and_nans_become_zero() -> None:
    token = tokens_of((12, 2, 16))
    mask = keep_mask(KEY, 0.5, token, 16)
    y = torch.where(mask, 1.0, float("inf"))
    out = residual_dropout(torch.zeros_like(y), y, None, 0.5, KEY, token)

    assert torch.equal(out, torch.where(mask, 2.0, 0.0))


def test_without_a_mask_the_gradient_passes_as_it_is() -> None:
    (x, y, bias), grad = drawn_inputs((4, 2, 8))
    out = residual_dropout(x.requires_grad_(), y.requires_grad_(), bias.requires_grad_(), 0.0, KEY, None)
    found = torch.autograd.grad(out, [x, y, bias], grad)

    assert found[0].data_ptr() == found[1].data_ptr() == grad.data_ptr()
    torch.testing.assert_close(found[2], grad.sum((0, 1)))


def test_strided_inputs_and_gradients_of_dropout() -> None:
    (x, y, bias), grad = drawn_inputs((6, 5, 5))
    token = tokens_of((6, 5, 5))

    def turned(operation):
        return lambda x, y, bias: operation(x.transpose(1, 2), y.transpose(1, 2), bias)

    assert not x.transpose(1, 2).is_contiguous()
    assert_same(turned(ours(0.3, token)), turned(plain(0.3, token)), [x, y, bias], grad.transpose(1, 2), 1e-12)


def test_dropout_keeps_the_mean() -> None:
    token = on_device(torch.arange(256)[:, None])
    out = dropout(torch.ones(256, 1, 256, dtype=torch.float64, device=UNDER_TEST.device), 0.3, KEY, token)

    assert out.mean().item() == pytest.approx(1.0, abs=4 * (0.3 / 0.7) ** 0.5 / 256)


def test_only_token_numbers_are_kept_for_backward() -> None:
    (x, y, bias), _ = drawn_inputs((12, 2, 16))
    token = tokens_of((12, 2, 16))

    def saved_by(operation) -> list[torch.Size]:
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
            operation(x.requires_grad_(), y.requires_grad_(), bias.requires_grad_())
        return [one.shape for one in saved]

    assert saved_by(lambda x, y, bias: dropout(x, 0.3, KEY, token)) == [token.shape]
    assert saved_by(ours(0.3, token)) == [token.shape]
    assert saved_by(ours(0.0, token)) == []


@pytest.mark.slow(kept=["shape3-dtype0", "shape3-dtype3"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 3, 16), (70, 123), (5, 2056), (300, 8), (0, 16), (4, 0)])
def test_dropout_operators_keep_the_contract(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    (x, y, bias), grad = drawn_inputs(shape, dtype)
    token = tokens_of(shape)

    assert_contract(OPS.residual_dropout.default, x, y, bias, token, 0.3, *KEY)
    assert_contract(OPS.residual_dropout.default, x, y, bias, None, 0.0, *KEY)
    assert_contract(OPS.residual_dropout.default, None, y, None, token, 0.3, *KEY)
    assert_contract(OPS.bias_dropout_backward.default, grad, token, 0.3, *KEY)
    assert_contract(OPS.bias_backward.default, grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dropout_of_an_input_at_an_odd_address(dtype: torch.dtype) -> None:
    inputs, _ = drawn_inputs((5, 3, 16), dtype)
    token = tokens_of((5, 3, 16))
    expected = OPS.residual_dropout(*inputs, token, 0.3, *KEY)
    for odd in range(3):
        moved = [misaligned(one) if number == odd else one for number, one in enumerate(inputs)]
        torch.testing.assert_close(OPS.residual_dropout(*moved, token, 0.3, *KEY), expected)


def test_dropout_refuses_wrong_inputs() -> None:
    (x, y, bias), grad = drawn_inputs((4, 2, 8), torch.float32)
    token = tokens_of((4, 2, 8))
    forward, backward = OPS.residual_dropout.default, OPS.bias_dropout_backward.default

    assert_refused(
        forward, (x[1:], y, None, token, 0.1, *KEY), r"residual must have the shape of y, \[4, 2, 8\], got \[3, 2, 8\]"
    )
    assert_refused(forward, (x.double(), y, None, token, 0.1, *KEY), "residual must be float32, got float64")
    assert_refused(forward, (x, y, bias[1:], token, 0.1, *KEY), r"bias must have shape \[8\], got \[7\]")
    assert_refused(forward, (None, y.long(), None, None, 0.0, *KEY), "y must be bf16, fp16, fp32 or fp64, got int64")
    assert_refused(forward, (None, y.transpose(0, 1), None, None, 0.0, *KEY), "y must be contiguous")
    assert_refused(forward, (x, y, bias, token.int(), 0.1, *KEY), "token must be int64, got int32")
    assert_refused(
        forward,
        (x, y, bias, token[1:], 0.1, *KEY),
        r"token must have one number for each row of y, \[4, 2, 8\], got \[3, 2\]",
    )
    assert_refused(forward, (x, y, bias, token.t().contiguous().t(), 0.1, *KEY), "token must be contiguous")
    assert_refused(forward, (x, y, bias, None, 0.1, *KEY), "token must be given where probability is not 0")
    for probability, text in ((1.0, r"1(\.0)?"), (-0.5, "-0.5"), (float("nan"), "nan")):
        message = f"probability must be at least 0 and less than 1, got {text}$"
        assert_refused(forward, (x, y, bias, token, probability, *KEY), message)
    assert_refused(
        backward,
        (grad, token[1:], 0.1, *KEY),
        r"token must have one number for each row of grad_out, \[4, 2, 8\], got \[3, 2\]",
    )
    assert_refused(OPS.bias_backward.default, (grad[0, 0, 0],), r"grad_out must have at least one dim, got \[\]")
    assert_refused(forward, (x, y, bias.double(), token, 0.1, *KEY), "bias must be float32, got float64")
    with pytest.raises(RuntimeError, match="bias must be contiguous"):
        OPS.residual_dropout(x, y, with_gaps(bias), token, 0.1, *KEY)
    with pytest.raises(RuntimeError, match="residual must be contiguous"):
        OPS.residual_dropout(with_gaps(x), y, bias, token, 0.1, *KEY)
