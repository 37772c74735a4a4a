"""Linear layers in 8-bit floating point: forward, dgrad and wgrad.

Inputs and weights are E4M3. With one scale per tensor, gradients are E5M2 (wider range); with one scale per row, E4M3
(torch's row-wise scaled GEMM supports no other format). A scale is computed from the tensor itself (current scaling),
or from its largest magnitudes in the last steps (delayed scaling), which saves a pass over it. Sums are in fp32,
results in x's dtype.
Sources: FP8 formats for deep learning (arXiv:2209.05433); torch._scaled_mm.
Shapes: T tokens (any dims), I inputs, O outputs (any dims: they are flattened); T, I and O multiples of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatrain.config.fp8 import DIM_MULTIPLE
from megatrain.ops.main_grad import MainGrad, main_grad_of
from megatrain.ops.quantization import (
    E4M3,
    E5M2,
    fp8_quantize,
    fp8_quantize_columns,
    fp8_quantize_rows,
    fp8_scale,
)


class Scaler(Protocol):
    """Provides the scale of one operand of a linear layer: one scale for the whole tensor."""

    def scale(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [scale, 1 / scale]. Shapes: result [2] fp32."""

    def observe(self, largest: Tensor) -> None:
        """Record magnitudes of the tensor that was just quantized, including its largest."""


class CurrentScaler:
    """Computes the scale from the tensor itself."""

    def scale(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return fp8_scale(x, dtype)

    def observe(self, largest: Tensor) -> None:
        """Do nothing: the next scale does not depend on `largest`."""


@dataclass(frozen=True, slots=True)
class TensorwiseFp8Linear:
    """linear() in FP8 with one scale each for input, weight and gradient."""

    x: Scaler
    weight: Scaler
    grad: Scaler

    def __call__(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Return x weight' + bias, like linear(), but save x in 8 bits and the weight itself for backward."""
        return _Tensorwise.apply(x_TI, weight_OI, bias_O, self, torch.is_grad_enabled())


def rowwise_fp8_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x weight' + bias. Each GEMM uses one scale per row of both operands, computed from the tensors themselves.

    Saves x in 8 bits and the weight itself for backward. Shapes and main_grads are the same as for linear().
    """
    return _Rowwise.apply(x_TI, weight_OI, bias_O, torch.is_grad_enabled())


class _Tensorwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        scalers: TensorwiseFp8Linear,
        has_backward: bool,
    ) -> Tensor:
        _store_shapes(ctx, x_TI, weight_OI, bias_O)
        x, weight = _matrix(x_TI), weight_OI.flatten(0, -2)
        needs_weight = has_backward and ctx.needs_input_grad[1]
        x_q, x_t, x_scale = _quantize(x, scalers.x, E4M3, needs_weight, has_backward)
        weight_q, _, weight_scale = _quantize(weight, scalers.weight, E4M3, False, has_backward)
        ctx.grad_scaler = scalers.grad
        ctx.save_for_backward(x_t, x_scale, weight_OI, weight_scale)
        # on CUDA, torch._scaled_mm cannot add a bias to a result in fp32
        bias, later = (None, _flat(bias_O)) if x.dtype == torch.float32 else (_flat(bias_O), None)
        out = torch._scaled_mm(
            x_q, weight_q.t(), x_scale[1], weight_scale[1], bias, out_dtype=x.dtype, use_fast_accum=True
        )
        if later is not None:
            out.add_(later)
        return out.view(*x_TI.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x_t, x_scale, weight_OI, weight_scale = ctx.saved_tensors
        grad_q, grad_t, grad_scale = _quantize(_matrix(grad_TO), ctx.grad_scaler, E5M2, ctx.needs_input_grad[1], True)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            # quantized again from the weight: a copy kept since forward would exist once per micro-batch in flight
            _, weight_t, _ = fp8_quantize(weight_OI.flatten(0, -2), weight_scale, E4M3, False, True)
            grad_x = torch._scaled_mm(grad_q, weight_t.t(), grad_scale[1], weight_scale[1], out_dtype=ctx.dtype)
            grad_x = grad_x.view(ctx.x_shape)
        if ctx.needs_input_grad[1]:
            grad_weight = _add_scaled_product(ctx, grad_t, x_t.t(), grad_scale[1], x_scale[1], _sum_dtype(ctx))
        return grad_x, grad_weight, _bias_gradient(ctx, grad_TO), None, None


class _Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, has_backward: bool) -> Tensor:
        _store_shapes(ctx, x_TI, weight_OI, bias_O)
        x, weight = _matrix(x_TI), weight_OI.flatten(0, -2)
        x_q, x_inverse = fp8_quantize_rows(x, E4M3)
        weight_q, weight_inverse = fp8_quantize_rows(weight, E4M3)
        needs_weight = has_backward and ctx.needs_input_grad[1]
        x_t, x_t_inverse = fp8_quantize_columns(x, E4M3) if needs_weight else (None, None)
        ctx.save_for_backward(x_t, x_t_inverse, weight_OI)
        out = torch._scaled_mm(
            x_q, weight_q.t(), x_inverse, weight_inverse.t(), _flat(bias_O), out_dtype=x.dtype, use_fast_accum=True
        )
        return out.view(*x_TI.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_t, x_t_inverse, weight_OI = ctx.saved_tensors
        grad = _matrix(grad_TO)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_q, grad_inverse = fp8_quantize_rows(grad, E4M3)
            weight_t, weight_t_inverse = fp8_quantize_columns(weight_OI.flatten(0, -2), E4M3)  # see _Tensorwise
            grad_x = torch._scaled_mm(grad_q, weight_t.t(), grad_inverse, weight_t_inverse.t(), out_dtype=ctx.dtype)
            grad_x = grad_x.view(ctx.x_shape)
        if ctx.needs_input_grad[1]:
            grad_t, grad_t_inverse = fp8_quantize_columns(grad, E4M3)
            # torch's row-wise scaled GEMM cannot return a wider dtype
            grad_weight = _add_scaled_product(ctx, grad_t, x_t.t(), grad_t_inverse, x_t_inverse.t(), ctx.dtype)
        return grad_x, grad_weight, _bias_gradient(ctx, grad_TO), None


def _quantize(
    x: Tensor, scaler: Scaler, dtype: torch.dtype, has_transposed: bool, is_observed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x in `dtype`, its transpose if `has_transposed`, and [scale, 1 / scale]."""
    scale = scaler.scale(x, dtype)
    q, q_t, largest = fp8_quantize(x, scale, dtype, True, has_transposed)
    if is_observed:  # not in evaluation: its data must not influence the scales of training
        scaler.observe(largest)
    return q, q_t, scale


def _matrix(x: Tensor) -> Tensor:
    return x.flatten(0, -2).contiguous()


def _flat(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.flatten()


def _store_shapes(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Store what backward needs besides tensors in `ctx`. Raises: RuntimeError for sizes that FP8 GEMMs reject."""
    for name, size in (("x", x.shape[:-1].numel()), ("x", x.shape[-1]), ("weight", weight.shape[:-1].numel())):
        if size % DIM_MULTIPLE:
            raise RuntimeError(
                f"{name} of shape {list((x if name == 'x' else weight).shape)} cannot be multiplied in FP8: "
                f"tokens, inputs and outputs must be multiples of {DIM_MULTIPLE}, got {size}"
            )
    ctx.main_grad = main_grad_of(weight)
    ctx.dtype, ctx.x_shape, ctx.weight_shape = x.dtype, x.shape, weight.shape
    ctx.bias_shape = None if bias is None else bias.shape


def _sum_dtype(ctx: Any) -> torch.dtype:
    """Return the wgrad's dtype: fp32 with a main_grad, so that the product is not rounded before it is added."""
    return ctx.dtype if ctx.main_grad is None else torch.float32


def _add_scaled_product(
    ctx: Any, a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, out_dtype: torch.dtype
) -> Tensor | None:
    """Return a @ b in the weight's shape and `out_dtype`, or pass it to the weight's main_grad and return None."""
    main_grad: MainGrad | None = ctx.main_grad
    if main_grad is None:
        return torch._scaled_mm(a, b, a_inverse, b_inverse, out_dtype=out_dtype).view(ctx.weight_shape)
    factors = (a.detach(), b.detach(), a_inverse.detach(), b_inverse.detach())
    main_grad.add_wgrad(partial(_add_to_sum, *factors, out_dtype))
    return None


def _add_to_sum(
    a: Tensor,
    b: Tensor,
    a_inverse: Tensor,
    b_inverse: Tensor,
    out_dtype: torch.dtype,
    total: Tensor,
    is_fresh: bool,
) -> None:
    total = total.flatten(0, -2)
    if is_fresh and total.dtype == out_dtype:
        torch._scaled_mm(a, b, a_inverse, b_inverse, out_dtype=out_dtype, out=total)
        return
    product = torch._scaled_mm(a, b, a_inverse, b_inverse, out_dtype=out_dtype)
    if is_fresh:
        total.copy_(product)
    else:
        total.add_(product)


def _bias_gradient(ctx: Any, grad_TO: Tensor) -> Tensor | None:
    return grad_TO.flatten(0, -2).sum(0).view(ctx.bias_shape) if ctx.needs_input_grad[2] else None


def _scaled_mm_out_on_meta(*_: Any, out: Tensor, **__: Any) -> Tensor:
    return out


# torch has no meta kernel for this overload, and a dry run needs one to write a product to a given tensor
torch.library.impl("aten::_scaled_mm.out", "Meta", _scaled_mm_out_on_meta)
