"""Rotary position embedding (RoFormer, arXiv:2104.09864), in the half-split convention of the Llama family.

Shapes: S sequence, B micro-batch, N heads, D head dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def inverse_frequencies(
    head_dim: int,
    theta: float,
    scaling: str = "none",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_seq_len: int = 8192,
) -> Tensor:
    """Return the angle a position adds to each pair of units, in fp64 on the CPU (models are built on meta).

    scaling = "linear" divides all by `factor`; "llama3" divides only the slow ones (wavelength above
    original_seq_len / low_freq_factor), keeps the fast ones and blends between (Llama 3.1's rule).
    Shapes: result [D / 2].
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    if scaling == "linear":
        return frequency / factor
    if scaling == "llama3":
        turns = original_seq_len * frequency / (2 * math.pi)
        keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
        return frequency * (keep + (1 - keep) / factor)
    return frequency


def rotary_table(seq_len: int, frequency: Tensor, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every position's angles, computed in fp64 and rounded once.

    Shapes: each [S, 1, 1, D / 2].
    """
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float64, device="cpu"), frequency)[:, None, None, :]
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def rotate(x_SBND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[d], x[d + D/2]) by its position's angle, in cos's dtype, rounded once to x's.

    Saves nothing of x for backward: the inverse turn is its own gradient.
    Shapes: x [S, ..., D]; cos and sin [S, 1, 1, D / 2].
    """
    return _Rotate.apply(x_SBND, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SBND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.cos, ctx.sin = cos, sin  # shared constants of the model, not activations
        return _turn(x_SBND, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad_SBND: Tensor) -> tuple[Tensor, None, None]:
        return _turn(grad_SBND, ctx.cos, -ctx.sin), None, None


def _turn(x_SBND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    place = (cos.shape[0], *[1] * (x_SBND.dim() - 2), cos.shape[-1])
    cos, sin = cos.view(place), sin.view(place)
    first, second = x_SBND.chunk(2, dim=-1)
    out = torch.empty(x_SBND.shape, dtype=x_SBND.dtype, device=x_SBND.device)
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.copy_((first * cos).sub_(second * sin))
    out_second.copy_((second * cos).add_(first * sin))
    return out
