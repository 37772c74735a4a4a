"""The norms as modules: they compute the sum of the residual stream and normalize it. Shapes: H hidden.

The function that computes a norm may be replaced, like the multiplication of a projection (model/linear.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from megatrain.config.kernels import KernelsConfig
from megatrain.config.model import ModelConfig
from megatrain.model.variant import build_variant
from megatrain.ops.apex_norm import ApexNorms, PlannedApex
from megatrain.ops.normalization import ResidualStream, layer_norm, rms_norm, zero_centered_rms_norm
from megatrain.ops.optional_backends import import_apex

Normalize = Callable[..., tuple[Tensor, Tensor]]
"""A function like layer_norm() or rms_norm(): takes (x, parameters, eps, added or None), returns (norm of sum, sum)."""


class LayerNorm(nn.Module):
    """Normalizes mean and variance over H, then scales and shifts."""

    normalize: Normalize = staticmethod(layer_norm)

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, stream: ResidualStream) -> tuple[Tensor, Tensor]:
        """Return (norm of the sum, the sum)."""
        return self.normalize(stream.x_SBH, self.weight, self.bias, self.eps, stream.added_SBH)


class RmsNorm(nn.Module):
    """Normalizes the root mean square over H, then scales."""

    normalize: Normalize = staticmethod(rms_norm)

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, stream: ResidualStream) -> tuple[Tensor, Tensor]:
        """Return (norm of the sum, the sum)."""
        return self.normalize(stream.x_SBH, self.weight, self.eps, stream.added_SBH)


class ZeroCenteredRmsNorm(RmsNorm):
    """RmsNorm with the scale 1 + weight, which is computed and applied in fp32 for half-precision weights."""

    normalize: Normalize = staticmethod(zero_centered_rms_norm)


_NORMS: Mapping[str, type[LayerNorm | RmsNorm]] = {
    "layernorm": LayerNorm,
    "rmsnorm": RmsNorm,
    "rmsnorm_zero_centered": ZeroCenteredRmsNorm,
}


def build_norm(config: ModelConfig) -> nn.Module:
    if config.is_own("norm"):
        return _NORMS[config.norm](config.hidden_size, config.norm_eps)
    return build_variant(config, "norm", config.norm_eps)


def use_norms(model: nn.Module, config: KernelsConfig, device: torch.device) -> None:
    """Make the backend in `config` compute the norms of `model`, except those of queries and keys.

    On the meta device, the backend does not have to be installed.
    Raises: ImportError when the backend is not installed.
    """
    if config.norm != "apex":
        return
    norms = ApexNorms(PlannedApex() if device.type == "meta" else import_apex())
    for module in model.modules():
        if isinstance(module, LayerNorm):
            module.normalize = norms.layer_norm
        elif isinstance(module, RmsNorm) and not isinstance(module, ZeroCenteredRmsNorm):
            module.normalize = norms.rms_norm
