"""LayerNorm and RMSNorm over the hidden dim. Statistics in fp32 (fp64 for fp64 input), one rounding to x's dtype.

Shapes: S sequence, B micro-batch, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.ops.precision import accumulate_dtype


def layer_norm(x_SBH: Tensor, weight_H: Tensor, bias_H: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias over H. Saves x and two numbers a token for backward."""
    if x_SBH.device.type == "cpu" and accumulate_dtype(x_SBH.dtype) != x_SBH.dtype:
        return _HalfLayerNormOnCpu.apply(x_SBH, weight_H, bias_H, eps)
    return functional.layer_norm(x_SBH, weight_H.shape, weight_H, bias_H, eps)


def rms_norm(x_SBH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over H. Saves x and one number a token for backward."""
    return _RmsNorm.apply(x_SBH, weight_H, eps)


class _HalfLayerNormOnCpu(torch.autograd.Function):
    """torch's kernel with backward in fp32: its own sums the gradients of weight and bias in bf16 on CPUs."""

    @staticmethod
    def forward(ctx: Any, x_SBH: Tensor, weight_H: Tensor, bias_H: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x_SBH, weight_H, bias_H)
        ctx.eps = eps
        return functional.layer_norm(x_SBH, weight_H.shape, weight_H, bias_H, eps)

    @staticmethod
    def backward(ctx: Any, grad_SBH: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        wide = [one.float().requires_grad_() for one in ctx.saved_tensors]
        with torch.enable_grad():
            out_SBH = functional.layer_norm(wide[0], wide[1].shape, wide[1], wide[2], ctx.eps)
        grads = torch.autograd.grad(out_SBH, wide, grad_SBH.float())
        x_grad, weight_grad, bias_grad = (grad.to(grad_SBH.dtype) for grad in grads)
        return x_grad, weight_grad, bias_grad, None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SBH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x = x_SBH.to(accumulate_dtype(x_SBH.dtype))
        # vector_norm reads x once and needs no temporary of x's size
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        rstd_SB1 = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x_SBH, weight_H, rstd_SB1)
        return (x * rstd_SB1).mul_(weight_H).to(x_SBH.dtype)

    @staticmethod
    def backward(ctx: Any, grad_SBH: Tensor) -> tuple[Tensor, Tensor, None]:
        x_SBH, weight_H, rstd_SB1 = ctx.saved_tensors
        accumulate = accumulate_dtype(x_SBH.dtype)
        normed = x_SBH.to(accumulate) * rstd_SB1
        grad = grad_SBH.to(accumulate)
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad_normed = grad * weight_H
        projection_SB1 = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = normed.mul_(projection_SB1).neg_().add_(grad_normed).mul_(rstd_SB1)
        return grad_x.to(x_SBH.dtype), grad_weight.to(weight_H.dtype), None
