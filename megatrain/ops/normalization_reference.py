"""The operators of normalization.py in torch operations, on every device without a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.ops.precision import accumulate_dtype


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x, and one number per row, as `rms_norm`."""
    wide = x.to(accumulate_dtype(x.dtype))
    # vector_norm reads x once and needs no temporary of x's size
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(max(x.shape[-1], 1))
    rstd = mean_square.add_(eps).rsqrt_()
    return (wide * rstd).mul_(weight).to(x.dtype), rstd


def reference_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of the sum, the sum, and one number per row."""
    total = x + residual
    out, rstd = reference_rms_norm(total, weight, eps)
    return out, total, rstd


def reference_rms_norm_backward(
    grad_out: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight; that of x includes grad_sum."""
    accumulate = accumulate_dtype(x.dtype)
    normed = x.to(accumulate) * rstd
    grad = grad_out.to(accumulate)
    grad_weight = (grad * normed).flatten(0, -2).sum(0)
    grad_normed = grad * weight
    projection = (grad_normed * normed).mean(-1, keepdim=True)
    grad_x = normed.mul_(projection.neg_()).add_(grad_normed).mul_(rstd)
    if grad_sum is not None:
        grad_x.add_(grad_sum)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def reference_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of x, and two numbers per row, as `layer_norm`."""
    wide = _widened_on_cpu(x)
    out, mean, rstd = torch.native_layer_norm(wide, weight.shape, _widened_on_cpu(weight), _widened_on_cpu(bias), eps)
    return out.to(x.dtype), mean, rstd


def reference_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the norm of the sum, the sum, and two numbers per row."""
    total = x + residual
    out, mean, rstd = reference_layer_norm(total, weight, bias, eps)
    return out, total, mean, rstd


def reference_layer_norm_backward(
    grad_out: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias; that of x includes grad_sum."""
    wide, grad, wide_weight = _widened_on_cpu(x), _widened_on_cpu(grad_out), _widened_on_cpu(weight)
    # not by torch's kernel, which adds rows one after another on CPUs and so is less precise than pairwise sums
    grad_bias = grad.flatten(0, -2).sum(0)
    grad_weight = (wide - mean).mul_(rstd).mul_(grad).flatten(0, -2).sum(0)
    # the weight is also passed in place of the bias: only the bias's dtype and shape matter here
    grad_x, _, _ = torch.ops.aten.native_layer_norm_backward(
        grad, wide, weight.shape, mean, rstd, wide_weight, wide_weight, [True, False, False]
    )
    if grad_sum is not None:
        grad_x.add_(grad_sum)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


def _widened_on_cpu(x: Tensor) -> Tensor:
    """Return x in fp32 (fp64 for fp64) on CPUs, and x itself on GPUs.

    torch's kernel sums the gradients of weight and bias in x's dtype on CPUs, but in fp32 on GPUs.
    """
    return x.to(accumulate_dtype(x.dtype)) if x.device.type == "cpu" else x
