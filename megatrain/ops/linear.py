"""Linear layers. Backward adds the gradient of a weight directly to its main_grad, if it has one.

Shapes: T tokens (any dims), I inputs, O outputs (any dims: they are flattened).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.ops.library import declare, require_same_device, require_shape
from megatrain.ops.main_grad import MainGrad, main_grad_of


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x weight' + bias. Saves x and the weight for backward.

    If the weight has a main_grad, backward adds the gradient to it and returns None to autograd.
    Shapes: x [..., I]; weight [*O, I]; bias [*O]; result [..., prod(O)].
    """
    return _Linear.apply(x_TI, weight_OI, bias_O)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.main_grad = main_grad_of(weight_OI)
        ctx.bias_shape = None if bias_O is None else bias_O.shape
        ctx.save_for_backward(x_TI, weight_OI)
        bias = None if bias_O is None else bias_O.flatten()
        return functional.linear(x_TI, weight_OI.flatten(0, -2), bias)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_TI, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = grad_TO @ weight_OI.flatten(0, -2) if needs_x else None
        grad_weight = weight_gradient(grad_TO, x_TI, weight_OI, ctx.main_grad) if needs_weight else None
        grad_bias = grad_TO.flatten(0, -2).sum(0).view(ctx.bias_shape) if needs_bias else None
        return grad_x, grad_weight, grad_bias


def weight_gradient(grad_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, main_grad: MainGrad | None) -> Tensor | None:
    """Return grad' x in the weight's shape and dtype, or pass it to `main_grad` and return None.

    Shapes: grad [..., O]; x [..., I]; weight [*O, I].
    """
    grad, x = grad_TO.detach().flatten(0, -2), x_TI.detach().flatten(0, -2)
    if main_grad is None:
        return (grad.t() @ x).view(weight_OI.shape)
    main_grad.add_wgrad(partial(_add_weight_gradient, grad, x))
    return None


def _add_weight_gradient(grad: Tensor, x: Tensor, total: Tensor, is_fresh: bool) -> None:
    add_product_(total.flatten(0, -2), grad, x, is_fresh)


def _check_add_product(total: Tensor, grad: Tensor, x: Tensor, is_fresh: bool) -> None:
    require_same_device("grad", grad, "total", total)
    require_same_device("x", x, "total", total)
    if grad.dim() != 2 or x.dim() != 2 or grad.shape[0] != x.shape[0]:
        raise RuntimeError(
            f"grad and x must be [T, O] and [T, I] with the same T, got {list(grad.shape)} and {list(x.shape)}"
        )
    require_shape("total", total, (grad.shape[1], x.shape[1]))
    if grad.dtype != x.dtype or total.dtype not in (x.dtype, torch.float32):
        raise RuntimeError(
            "grad and x must have the same dtype, and total must have that dtype or float32; "
            f"got {grad.dtype}, {x.dtype} and {total.dtype}"
        )


def _reference_add_product(total: Tensor, grad: Tensor, x: Tensor, is_fresh: bool) -> None:
    if total.dtype == x.dtype:
        total.addmm_(grad.t(), x, beta=0 if is_fresh else 1)
        return
    product = grad.t() @ x  # rounded to x's dtype: on CPUs torch has no GEMM with a wider result
    if is_fresh:
        total.copy_(product)
    else:
        total.add_(product)


def _add_product_on_cuda(total: Tensor, grad: Tensor, x: Tensor, is_fresh: bool) -> None:
    _check_add_product(total, grad, x, is_fresh)
    if total.dtype == x.dtype:
        total.addmm_(grad.t(), x, beta=0 if is_fresh else 1)
    elif is_fresh:
        torch.mm(grad.t(), x, out_dtype=total.dtype, out=total)
    else:  # adds a bf16 product to fp32 without a copy, because input and output are the same memory
        torch.addmm(total, grad.t(), x, out_dtype=total.dtype, out=total)


add_product_ = declare(
    "add_product_(Tensor(a!) total, Tensor grad, Tensor x, bool is_fresh) -> ()",
    check=_check_add_product,
    reference=_reference_add_product,
    fake=lambda total, grad, x, is_fresh: None,
    cuda=_add_product_on_cuda,
)
"""Add grad' x to `total`, or overwrite `total` if it is fresh. Shapes: total [O, I]; grad [T, O]; x [T, I]."""
