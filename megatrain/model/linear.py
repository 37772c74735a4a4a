"""A projection without bias. Shapes: I inputs, O outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.ops.linear import linear


class Linear(nn.Module):
    """x weight', weight [O, I]."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs))

    def forward(self, x_TI: Tensor) -> Tensor:
        return linear(x_TI, self.weight)
