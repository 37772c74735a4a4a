"""The two norms as modules: they add up the residual stream and give its norm. Shapes: H hidden."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.config.model import ModelConfig
from megatrain.ops.normalization import layer_norm, rms_norm
from megatrain.ops.residual import ResidualStream


class LayerNorm(nn.Module):
    """Mean and variance removed over H, then scale and shift."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, stream: ResidualStream) -> tuple[Tensor, Tensor]:
        """Return (norm of the sum, the sum)."""
        return layer_norm(stream.x_SBH, self.weight, self.bias, self.eps, stream.added_SBH)


class RmsNorm(nn.Module):
    """Root mean square removed over H, then scale."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, stream: ResidualStream) -> tuple[Tensor, Tensor]:
        """Return (norm of the sum, the sum)."""
        return rms_norm(stream.x_SBH, self.weight, self.eps, stream.added_SBH)


def build_norm(config: ModelConfig) -> nn.Module:
    kind = LayerNorm if config.norm == "layernorm" else RmsNorm
    return kind(config.hidden_size, config.norm_eps)
