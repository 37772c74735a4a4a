"""The norms as model code writes them in plain torch: the reference for kernels and backends.

Shapes: x [..., H]; weight and bias [H].
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-5


def eager_rms(x: Tensor, weight: Tensor) -> Tensor:
    """As in model code: statistics in fp32 at least, the product in x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


def plain_add_rms(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([eager_rms(x + residual, weight), x + residual])


def plain_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.stack([plain_layer_norm(x + residual, weight, bias), x + residual])
