"""Projections: modules that multiply by a weight. Shapes: I inputs, O outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatrain.ops.linear import linear

Product = Callable[..., Tensor]
"""A function like linear(): takes (x, weight) or (x, weight, bias), and returns x weight' + bias."""


class Projection(nn.Module):
    """A module with one matrix multiplication. `multiply` may be replaced, for example by an FP8 multiplication."""

    multiply: Product = staticmethod(linear)


class Linear(Projection):
    """x weight', weight [O, I]."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs))

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.multiply(x_TI, self.weight)
