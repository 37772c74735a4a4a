"""The product with a weight compared with torch's, and its gradient added to a sum in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megatrain.ops.linear import linear
from megatrain.ops.main_grad import Addition, set_main_grad
from tests.helpers.kernels import UNDER_TEST, draw
from tests.helpers.operator_contract import assert_contract, assert_refused
from tests.helpers.relative_error import assert_no_worse_than_eager, assert_same

OPS = torch.ops.megatrain


class Sum:
    """A main_grad that counts how often it was taken."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.memory = torch.full(shape, torch.nan, dtype=dtype, device=UNDER_TEST.device)
        self.num_taken = 0

    def add(self, add: Addition) -> None:
        self.num_taken += 1
        add(self.memory, self.num_taken == 1)

    add_wgrad = add


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight.flatten(0, -2), None if bias is None else bias.flatten())


@pytest.mark.parametrize("shape", [(5,), (2, 3), (4, 3, 2)])
def test_linear_is_torchs_with_outputs_of_any_dims(shape: tuple[int, ...]) -> None:
    inputs = [draw(6, 2, 7), draw(*shape, 7, seed=1)]
    num_outputs = inputs[1].flatten(0, -2).shape[0]

    assert_same(linear, plain, inputs, draw(6, 2, num_outputs, seed=2), 1e-12)
    assert_same(linear, plain, [*inputs, draw(*shape, seed=3)], draw(6, 2, num_outputs, seed=2), 1e-12)


def test_linear_gradients_are_the_slopes() -> None:
    inputs = [draw(3, 2, 4), draw(2, 3, 4, seed=1), draw(2, 3, seed=2)]

    assert torch.autograd.gradcheck(linear, [one.requires_grad_() for one in inputs])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_loses_no_more_than_plain_torch(dtype: torch.dtype) -> None:
    inputs = [draw(64, 2, 48, dtype=dtype), draw(40, 48, dtype=dtype, seed=1), draw(40, dtype=dtype, seed=2)]

    assert_no_worse_than_eager(linear, plain, inputs, draw(64, 2, 40, dtype=dtype, seed=3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gradients_of_micro_batches_add_up_in_the_sink(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight = nn.Parameter(draw(3, 4, 8, dtype=dtype))
    main_grad = Sum((3, 4, 8), wide)
    set_main_grad(weight, main_grad)
    expected = torch.zeros(3, 4, 8, dtype=torch.float64, device=UNDER_TEST.device)
    rounded = torch.zeros(3, 4, 8, dtype=wide, device=UNDER_TEST.device)
    for number in range(3):
        x, grad = draw(16, 8, dtype=dtype, seed=number), draw(16, 12, dtype=dtype, seed=10 + number)
        x.requires_grad_()
        linear(x, weight).backward(grad)
        expected += (grad.double().t() @ x.detach().double()).view(3, 4, 8)
        rounded += (grad.t() @ x.detach()).view(3, 4, 8)
        torch.testing.assert_close(x.grad, grad @ weight.detach().flatten(0, 1), rtol=1.6e-2, atol=1e-2)

    assert weight.grad is None
    assert main_grad.num_taken == 3
    # Eager torch offers only products that are rounded to dtype and then added in the wider type.
    error, eager_error = ((total.double() - expected).abs().max().item() for total in (main_grad.memory, rounded))
    assert error <= 3 * eager_error + 1e-7


def test_the_sink_is_found_where_saved_tensors_are_replaced() -> None:
    weight = nn.Parameter(draw(4, 8))
    main_grad = Sum((4, 8), torch.float64)
    set_main_grad(weight, main_grad)
    x, grad = draw(16, 8, seed=1), draw(16, 4, seed=2)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.detach().clone(), lambda one: one):
        out = linear(x, weight)
    out.backward(grad)

    torch.testing.assert_close(main_grad.memory, grad.t() @ x)


def test_a_weight_that_is_frozen_takes_nothing() -> None:
    weight = nn.Parameter(draw(4, 8), requires_grad=False)
    main_grad = Sum((4, 8), torch.float64)
    set_main_grad(weight, main_grad)
    linear(draw(16, 8, seed=1).requires_grad_(), weight).sum().backward()

    assert main_grad.num_taken == 0


@pytest.mark.slow(kept=["dtype1-False", "dtype0-True"])
@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_product_keeps_the_contract(dtype: torch.dtype, is_fresh: bool) -> None:
    for rows in (0, 1, 24):
        total = draw(5, 7, dtype=torch.float32)
        factors = draw(rows, 5, dtype=dtype, seed=1), draw(rows, 7, dtype=dtype, seed=2)
        assert_contract(OPS.add_product_.default, total, *factors, is_fresh)


def test_a_fresh_sum_may_hold_anything() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        total = torch.full((5, 7), torch.nan, device=UNDER_TEST.device)
        OPS.add_product_(total, draw(3, 5, dtype=dtype), draw(3, 7, dtype=dtype, seed=1), True)
        assert torch.isfinite(total).all()


def test_add_product_refuses_wrong_inputs() -> None:
    operator, total, grad, x = OPS.add_product_.default, draw(5, 7), draw(3, 5, seed=1), draw(3, 7, seed=2)

    assert_refused(operator, (total[:4], grad, x, True), r"total must have shape \[5, 7\], got \[4, 7\]")
    assert_refused(operator, (total, grad[:2], x, True), r"with the same T, got \[2, 5\] and \[3, 7\]")
    assert_refused(operator, (total, grad.float(), x, True), "grad and x must have the same dtype")
    assert_refused(operator, (total.bfloat16(), grad.float(), x.float(), True), "total must have that dtype or float32")
