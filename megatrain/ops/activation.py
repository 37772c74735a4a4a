"""The activation functions of the MLP, fused with the bias of the matrix multiplication before them.

The bias is added in fp32 (fp64 for fp64), and the result is rounded once to x's dtype. Without a bias, the plain torch
form also rounds the activated gate, before the product. Backward needs only x and the bias.
Shapes: S sequence, B micro-batch, F ffn (any dims may come before the last ones).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.ops.activation_reference import (
    biased,
    reference_bias_gelu_backward,
    reference_bias_swiglu_backward,
    reference_gelu,
    reference_gelu_backward,
    reference_swiglu,
    reference_swiglu_backward,
)
from megatrain.ops.host_swiglu import host_swiglu_backward, swiglu_backward_kernel
from megatrain.ops.library import (
    HostImplementation,
    declare,
    require_contiguous,
    require_floating,
    require_same_kind,
    require_shape,
)
from megatrain.ops.recomputed import recomputed


def bias_gelu(x_SBF: Tensor, bias_F: Tensor | None) -> Tensor:
    """Return gelu(x + bias) in the tanh approximation (GPT-2's). Saves x for backward, and nothing else of its size."""
    return _BiasGelu.apply(x_SBF, bias_F)


def bias_swiglu(x_SB2F: Tensor, bias_2F: Tensor | None) -> Tensor:
    """Return silu(gate) * up, where x + bias holds gate and up. Saves x for backward, and nothing else of its size.

    Shapes: x [S, B, 2, F]; bias [2, F]; result [S, B, F].
    """
    return _BiasSwiglu.apply(x_SB2F, bias_2F)


def bias_gelu_exact(x_SB1F: Tensor, bias_1F: Tensor | None) -> Tensor:
    """Return gelu(x + bias) with the error function. Saves x for backward. There is no compiled kernel.

    Shapes: x [S, B, 1, F]; bias [1, F]; result [S, B, F].
    """
    return recomputed(_gelu_exact, x_SB1F, bias_1F)


def bias_geglu(x_SB2F: Tensor, bias_2F: Tensor | None) -> Tensor:
    """Return gelu(gate) * up in the tanh approximation, where x + bias holds gate and up. Saves x for backward.

    There is no compiled kernel. Shapes: x [S, B, 2, F]; bias [2, F]; result [S, B, F].
    """
    return recomputed(_geglu, x_SB2F, bias_2F)


def _gelu_exact(x: Tensor, bias: Tensor | None) -> Tensor:
    return functional.gelu(x if bias is None else biased(x, bias)).squeeze(-2).to(x.dtype)


def _geglu(x: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = (x if bias is None else biased(x, bias)).unbind(-2)
    return (functional.gelu(gate, approximate="tanh") * up).to(x.dtype)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SBF: Tensor, bias_F: Tensor | None) -> Tensor:
        x_SBF = x_SBF.contiguous()
        ctx.save_for_backward(x_SBF, bias_F)
        return _bias_gelu_op(x_SBF, bias_F)

    @staticmethod
    def backward(ctx: Any, grad_SBF: Tensor) -> tuple[Tensor, Tensor | None]:
        x_SBF, bias_F = ctx.saved_tensors
        grad_SBF = grad_SBF.contiguous()
        if bias_F is None:
            return _gelu_backward_op(grad_SBF, x_SBF), None
        return _bias_gelu_backward_op(grad_SBF, x_SBF, bias_F)


class _BiasSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SB2F: Tensor, bias_2F: Tensor | None) -> Tensor:
        x_SB2F = x_SB2F.contiguous()
        ctx.save_for_backward(x_SB2F, bias_2F)
        return _bias_swiglu_op(x_SB2F, bias_2F)

    @staticmethod
    def backward(ctx: Any, grad_SBF: Tensor) -> tuple[Tensor, Tensor | None]:
        x_SB2F, bias_2F = ctx.saved_tensors
        grad_SBF = grad_SBF.contiguous()
        if bias_2F is None:
            return _swiglu_backward_op(grad_SBF, x_SB2F), None
        return _bias_swiglu_backward_op(grad_SBF, x_SB2F, bias_2F)


def _check_gelu(x: Tensor, bias: Tensor | None) -> None:
    require_floating("x", x)
    if x.dim() < 1:
        raise RuntimeError(f"x must have at least one dim, got {list(x.shape)}")
    require_contiguous("x", x)
    _check_bias(bias, x, x.shape[-1:])


def _check_swiglu(x: Tensor, bias: Tensor | None) -> None:
    require_floating("x", x)
    if x.dim() < 2 or x.shape[-2] != 2:
        raise RuntimeError(f"x must have shape [..., 2, F], got {list(x.shape)}")
    require_contiguous("x", x)
    _check_bias(bias, x, x.shape[-2:])


def _check_bias(bias: Tensor | None, x: Tensor, shape: torch.Size) -> None:
    if bias is not None:
        require_same_kind("bias", bias, "x", x)
        require_shape("bias", bias, shape)
        require_contiguous("bias", bias)


def _check_gelu_backward(grad_out: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
    _check_gelu(x, bias)
    _check_gradient(grad_out, x, x.shape)


def _check_swiglu_backward(grad_out: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
    _check_swiglu(x, bias)
    _check_gradient(grad_out, x, (*x.shape[:-2], x.shape[-1]))


def _check_gradient(grad_out: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    require_same_kind("grad_out", grad_out, "x", x)
    require_shape("grad_out", grad_out, shape)
    require_contiguous("grad_out", grad_out)


_bias_gelu_op = declare(
    "bias_gelu(Tensor x, Tensor? bias) -> Tensor",
    check=_check_gelu,
    reference=reference_gelu,
    fake=lambda x, bias: torch.empty_like(x),
)
_gelu_backward_op = declare(
    "gelu_backward(Tensor grad_out, Tensor x) -> Tensor",
    check=_check_gelu_backward,
    reference=reference_gelu_backward,
    fake=lambda grad_out, x: torch.empty_like(x),
)
_bias_gelu_backward_op = declare(
    "bias_gelu_backward(Tensor grad_out, Tensor x, Tensor bias) -> (Tensor grad_x, Tensor grad_bias)",
    check=_check_gelu_backward,
    reference=reference_bias_gelu_backward,
    fake=lambda grad_out, x, bias: (torch.empty_like(x), torch.empty_like(bias)),
)
_bias_swiglu_op = declare(
    "bias_swiglu(Tensor x, Tensor? bias) -> Tensor",
    check=_check_swiglu,
    reference=reference_swiglu,
    fake=lambda x, bias: x.new_empty((*x.shape[:-2], x.shape[-1])),
)
_swiglu_backward_op = declare(
    "swiglu_backward(Tensor grad_out, Tensor x) -> Tensor",
    check=_check_swiglu_backward,
    reference=reference_swiglu_backward,
    host=HostImplementation(swiglu_backward_kernel, host_swiglu_backward),
    fake=lambda grad_out, x: torch.empty_like(x),
)
_bias_swiglu_backward_op = declare(
    "bias_swiglu_backward(Tensor grad_out, Tensor x, Tensor bias) -> (Tensor grad_x, Tensor grad_bias)",
    check=_check_swiglu_backward,
    reference=reference_bias_swiglu_backward,
    fake=lambda grad_out, x, bias: (torch.empty_like(x), torch.empty_like(bias)),
)
