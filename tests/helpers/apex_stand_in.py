"""The part of NVIDIA apex that megatrain calls, with its signatures (apex/normalization/fused_layer_norm.py), in plain
torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the norm, with sums in fp32 and one rounding at the end."""
    _check(input, normalized_shape, weight, bias)
    wide = input.float()
    centered = wide - wide.mean(-1, keepdim=True)  # torch's own norm adds rows sequentially on CPUs.
    rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    return (centered * rstd * weight.float() + bias.float()).to(input.dtype)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the norm, with sums in fp32 and one rounding at the end."""
    _check(input, normalized_shape, weight)
    return functional.rms_norm(input.float(), list(normalized_shape), weight.float(), eps).to(input.dtype)


def _check(input: Tensor, normalized_shape: Sequence[int], *parameters: Tensor) -> None:
    for parameter in parameters:
        assert tuple(parameter.shape) == tuple(normalized_shape)
        assert parameter.dtype == input.dtype
    assert input.dtype in (torch.float32, torch.float16, torch.bfloat16)
