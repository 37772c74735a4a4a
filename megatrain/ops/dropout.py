"""Dropout whose mask is a pure function of place, so that every layout and every recomputation draws the same.

Shapes: S sequence, B micro-batch, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatrain import rng


def dropout(x_SBH: Tensor, probability: float, key: tuple[int, int], token_SB: Tensor) -> Tensor:
    """Zero each element with `probability` and scale the rest by 1 / (1 - probability).

    Saves no mask for backward: it is drawn again.
    Shapes: x [S, B, H]; token_SB [S, B] int64, the global number of each token.
    """
    return _Dropout.apply(x_SBH, probability, key, token_SB)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SBH: Tensor, probability: float, key: tuple[int, int], token_SB: Tensor) -> Tensor:
        ctx.probability, ctx.key = probability, key
        ctx.save_for_backward(token_SB)
        return _apply_mask(x_SBH, probability, key, token_SB)

    @staticmethod
    def backward(ctx: Any, grad_SBH: Tensor) -> tuple[Tensor, None, None, None]:
        (token_SB,) = ctx.saved_tensors
        return _apply_mask(grad_SBH, ctx.probability, ctx.key, token_SB), None, None, None


def _apply_mask(x_SBH: Tensor, probability: float, key: tuple[int, int], token_SB: Tensor) -> Tensor:
    mask = rng.keep_mask(key, probability, token_SB, x_SBH.shape[-1])
    return (x_SBH * mask).mul_(1.0 / (1.0 - probability))
