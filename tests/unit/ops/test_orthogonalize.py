"""The Newton-Schulz iteration compared with the singular value decomposition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.ops.orthogonalize import COEFFICIENTS, NUM_STEPS, orthogonalized, orthogonalizing_flops

SHAPES = [(12, 12), (7, 30), (30, 7), (1, 9), (9, 1)]


def draw(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, columns, dtype=dtype, generator=torch.Generator().manual_seed(rows))


def by_singular_values(x: Tensor) -> Tensor:
    """Return the result with the iteration applied to each singular value, and unchanged vectors."""
    left, values, right = torch.linalg.svd(x / x.norm(), full_matrices=False)
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(NUM_STEPS):
        values = linear * values + cubic * values**3 + quintic * values**5
    return left @ torch.diag(values) @ right


def test_every_singular_value_is_mapped_by_the_polynomial() -> None:
    for shape in SHAPES:
        x = draw(*shape)
        assert torch.allclose(orthogonalized(x), by_singular_values(x), rtol=1e-11, atol=1e-11), shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_result_is_close_to_the_nearest_orthogonal_matrix(dtype: torch.dtype) -> None:
    slack = 0.05 if dtype == torch.bfloat16 else 1e-4
    for shape in SHAPES:
        left, _, right = torch.linalg.svd(draw(*shape), full_matrices=False)
        # The smallest is 0.02 of the norm, so the published bounds apply.
        values = torch.linspace(1.0, 0.1, len(right), dtype=torch.float64)
        found = orthogonalized((left @ torch.diag(values) @ right).to(dtype))
        on_vectors = left.t() @ found.double() @ right.t()
        assert found.dtype == dtype
        assert 0.68 - slack <= on_vectors.diagonal().min(), shape
        assert on_vectors.diagonal().max() <= 1.14 + slack, shape
        assert (on_vectors - torch.diag(on_vectors.diagonal())).abs().max() <= slack, shape


def test_result_is_independent_of_scale_and_zeros_stay() -> None:
    x = draw(5, 8)

    torch.testing.assert_close(orthogonalized(1e6 * x), orthogonalized(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(orthogonalized(-x), -orthogonalized(x), rtol=0, atol=0)
    assert not orthogonalized(torch.zeros(5, 8)).any()


def test_flops_are_those_of_the_products_with_the_shorter_side() -> None:
    assert orthogonalizing_flops(3, 10) == orthogonalizing_flops(10, 3)
    # two products [3, 10] x [10, 3] and [3, 3] x [3, 10], one [3, 3] x [3, 3], a multiplication and an addition each
    assert orthogonalizing_flops(3, 10) == 5 * 2 * (3 * 10 * 3 + 3 * 3 * 3 + 3 * 3 * 10)
