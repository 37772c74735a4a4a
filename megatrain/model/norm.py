"""The two norms as modules. Shapes: H hidden."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.config.model import ModelConfig
from megatrain.ops.normalization import layer_norm, rms_norm


class LayerNorm(nn.Module):
    """Mean and variance removed over H, then scale and shift."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x_SBH: Tensor) -> Tensor:
        return layer_norm(x_SBH, self.weight, self.bias, self.eps)


class RmsNorm(nn.Module):
    """Root mean square removed over H, then scale."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x_SBH: Tensor) -> Tensor:
        return rms_norm(x_SBH, self.weight, self.eps)


def build_norm(config: ModelConfig) -> nn.Module:
    kind = LayerNorm if config.norm == "layernorm" else RmsNorm
    return kind(config.hidden_size, config.norm_eps)
