"""Parameters of a model, drawn from a fixed seed."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def draw_parameters(model: nn.Module, spread: float = 0.3) -> torch.Generator:
    """Set the parameters to normal numbers of this standard deviation; return the generator of the numbers."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * spread)
    return generator
