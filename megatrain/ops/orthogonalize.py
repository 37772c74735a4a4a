"""The nearest matrix with orthonormal rows or columns, approximately: every singular value becomes about 1.

Five steps of a quintic Newton-Schulz iteration: X <- a X + b (X X^T) X + c (X X^T)^2 X. Each step maps every singular
value s to a s + b s^3 + c s^5 and leaves the singular vectors. The coefficients make the slope at 0 steep instead of
making the iteration converge: from a normalized matrix, singular values of 0.01 and more end between 0.68 and 1.14.
The work is matrix multiplications only, in the matrix's dtype. Source: Keller Jordan, Muon, 2024.
Shapes: R rows, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
"""The smallest divisor, so that a matrix of zeros stays zero."""


def orthogonalized(x_RC: Tensor) -> Tensor:
    """Return `x_RC` with its singular values near 1. Shapes: result [R, C], maybe transposed in memory."""
    linear, cubic, quintic = COEFFICIENTS
    is_tall = x_RC.shape[0] > x_RC.shape[1]
    x = x_RC.t() if is_tall else x_RC  # the square of the shorter side is smaller
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(NUM_STEPS):
        square = x @ x.t()
        polynomial = torch.addmm(square, square, square, beta=cubic, alpha=quintic)
        x = torch.addmm(x, polynomial, x, beta=linear)
    return x.t() if is_tall else x


def orthogonalizing_flops(num_rows: int, num_columns: int) -> float:
    """Return the FLOPs of `orthogonalized` for a matrix."""
    short, long = sorted((num_rows, num_columns))
    return float(NUM_STEPS * 2 * short * short * (2 * long + short))
