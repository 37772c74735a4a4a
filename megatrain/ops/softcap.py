"""Soft caps: c * tanh(x / c), which bounds x by c (Gemma 2, arXiv:2408.00118)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def softcap_(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap). Overwrites x, which must have no other use, and keeps it for backward."""
    return _SoftCap.apply(x, cap)


class _SoftCap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        tanh = x.detach().div_(cap).tanh_()
        ctx.save_for_backward(tanh)
        torch.autograd.graph.increment_version(x)
        return tanh * cap

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (tanh,) = ctx.saved_tensors
        return grad * (1 - tanh * tanh), None
