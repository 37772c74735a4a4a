"""FP8 products compared with the same products in fp64: within the error of three bits, and unbiased enough for
sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megatrain.ops.fp8_linear import CurrentScaler, TensorwiseFp8Linear, rowwise_fp8_linear
from megatrain.ops.linear import linear
from megatrain.ops.main_grad import Addition, set_main_grad
from tests.helpers.fp8_error import GRADIENT_ERROR, INPUT_ERROR, relative
from tests.helpers.kernels import UNDER_TEST, draw
from tests.helpers.relative_error import forward_and_backward

Product = Callable[..., Tensor]


def tensorwise() -> TensorwiseFp8Linear:
    return TensorwiseFp8Linear(CurrentScaler(), CurrentScaler(), CurrentScaler())


PRODUCTS = {"tensorwise": tensorwise(), "rowwise": rowwise_fp8_linear}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", PRODUCTS)
def test_fp8_products_are_off_by_what_their_bits_allow(name: str, dtype: torch.dtype) -> None:
    if name == "rowwise" and dtype == torch.float32 and UNDER_TEST.kind == "cuda":
        pytest.skip("torch's products by row give bf16 only on CUDA")
    inputs = [draw(64, 4, 96, dtype=dtype), draw(3, 32, 96, dtype=dtype, seed=1), draw(3, 32, dtype=dtype, seed=2)]
    grad = draw(64, 4, 96, dtype=dtype, seed=3)
    truth = forward_and_backward(linear, [one.double() for one in inputs], grad.double())
    out, grad_x, grad_weight, grad_bias = forward_and_backward(PRODUCTS[name], inputs, grad)

    of_grad = INPUT_ERROR if name == "rowwise" else GRADIENT_ERROR
    assert relative(out, truth[0]) < 1.2 * (2 * INPUT_ERROR**2) ** 0.5
    assert relative(grad_x, truth[1]) < 1.2 * (INPUT_ERROR**2 + of_grad**2) ** 0.5
    assert relative(grad_weight, truth[2]) < 1.2 * (INPUT_ERROR**2 + of_grad**2) ** 0.5
    assert grad_weight.shape == (3, 32, 96)
    torch.testing.assert_close(grad_bias.double(), truth[3], rtol=2e-2, atol=0.2)


def test_scales_of_rows_save_what_a_scale_of_the_tensor_loses() -> None:
    x, weight = draw(64, 96, dtype=torch.bfloat16), draw(32, 96, dtype=torch.bfloat16, seed=1)
    x[0] *= 2.0**20  # With one scale, all other rows become subnormal numbers or zeros.

    truth = x.double() @ weight.double().t()
    lost, kept = ((product(x, weight).double() - truth)[1:].norm() for product in PRODUCTS.values())
    assert kept < 0.2 * lost
    assert kept / truth[1:].norm() < 1.2 * (2 * INPUT_ERROR**2) ** 0.5


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_weights_gradient_goes_to_its_sink(name: str) -> None:
    weight = nn.Parameter(draw(32, 48, dtype=torch.bfloat16, seed=1))
    plain = nn.Parameter(weight.detach().clone())
    total = torch.full((32, 48), torch.nan, device=UNDER_TEST.device)
    taken: list[bool] = []

    class Sum:
        def add(self, add: Addition) -> None:
            taken.append(not taken)
            add(total, taken[-1])

        add_wgrad = add

    set_main_grad(weight, Sum())
    expected = torch.zeros(32, 48, dtype=torch.float64, device=UNDER_TEST.device)
    for number in range(2):
        x, grad = (
            draw(64, 48, dtype=torch.bfloat16, seed=2 + number),
            draw(64, 32, dtype=torch.bfloat16, seed=7 + number),
        )
        PRODUCTS[name](x, weight).backward(grad)
        PRODUCTS[name](x, plain).backward(grad)
        expected += plain.grad.double()
        plain.grad = None

    assert taken == [True, False]
    assert weight.grad is None
    assert relative(total, expected) < 4e-3  # In the other form each gradient is rounded to bf16.


@pytest.mark.parametrize("name", PRODUCTS)
def test_saved_tensors_have_eight_bits(name: str) -> None:
    kept: list[Tensor] = []
    x, weight = draw(64, 48, dtype=torch.bfloat16).requires_grad_(), nn.Parameter(draw(32, 48, dtype=torch.bfloat16))
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        out = PRODUCTS[name](x, weight)
    del out
    # The weight itself exists anyway: its derived forms must not be kept once for each micro-batch in flight.
    others = [one for one in kept if one.data_ptr() != weight.data_ptr()]
    assert len(others) < len(kept)
    assert sum(other.numel() * other.itemsize for other in others) <= 64 * 48 + 4 * (48 + 4)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_gradient_that_is_not_finite_stays_visible(name: str) -> None:
    x, weight = draw(16, 32, dtype=torch.bfloat16).requires_grad_(), nn.Parameter(draw(16, 32, dtype=torch.bfloat16))
    grad = draw(16, 16, dtype=torch.bfloat16)
    grad[3, 5] = torch.inf
    PRODUCTS[name](x, weight).backward(grad)

    assert not weight.grad.isfinite().all()
    assert not x.grad.isfinite().all()


@pytest.mark.parametrize("name", PRODUCTS)
def test_sizes_that_fp8_cannot_multiply_are_refused(name: str) -> None:
    for x_shape, weight_shape, message in (
        ((15, 32), (16, 32), r"x of shape \[15, 32\] cannot be multiplied in FP8: .* multiples of 16, got 15"),
        ((16, 24), (16, 24), r"x of shape \[16, 24\] cannot be multiplied in FP8: .* multiples of 16, got 24"),
        ((16, 32), (3, 5, 32), r"weight of shape \[3, 5, 32\] cannot be multiplied in FP8: .* multiples of 16, got 15"),
    ):
        with pytest.raises(RuntimeError, match=message):
            PRODUCTS[name](draw(*x_shape, dtype=torch.bfloat16), draw(*weight_shape, dtype=torch.bfloat16))
