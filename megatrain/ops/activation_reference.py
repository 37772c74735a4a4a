"""The operators of activation.py in torch operations, on every device without a kernel.

Shapes: as in activation.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.ops.precision import accumulate_dtype


def biased(x: Tensor, bias: Tensor) -> Tensor:
    """Return x + bias in fp32 (fp64 for fp64)."""
    return x.to(accumulate_dtype(x.dtype)) + bias


def reference_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return the activation, as `bias_gelu`."""
    if bias is None:
        return functional.gelu(x, approximate="tanh")
    return torch.ops.aten.gelu_(biased(x, bias), approximate="tanh").to(x.dtype)


def reference_gelu_backward(grad_out: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x, without a bias."""
    return torch.ops.aten.gelu_backward(grad_out, x, approximate="tanh")


def reference_bias_gelu_backward(grad_out: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and bias."""
    wide = biased(x, bias)
    grad_x = torch.ops.aten.gelu_backward.grad_input(grad_out.to(wide.dtype), wide, approximate="tanh", grad_input=wide)
    return grad_x.to(x.dtype), grad_x.flatten(0, -2).sum(0).to(x.dtype)


def reference_swiglu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return the activation, as `bias_swiglu`."""
    gate, up = (x if bias is None else biased(x, bias)).unbind(-2)
    return functional.silu(gate).mul_(up).to(x.dtype)


def reference_swiglu_backward(grad_out: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x, without a bias."""
    gate, up = x.unbind(-2)
    grad_x = torch.empty_like(x)
    grad_gate, grad_up = grad_x.unbind(-2)
    # four passes write their results directly into grad_x, without a temporary of the activation's size
    torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad_out)
    torch.ops.aten.silu_backward.grad_input(grad_out, gate, grad_input=grad_gate).mul_(up)
    return grad_x


def reference_bias_swiglu_backward(grad_out: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and bias."""
    wide = biased(x, bias)
    grad_x = reference_swiglu_backward(grad_out.to(wide.dtype), wide)
    return grad_x.to(x.dtype), grad_x.flatten(0, -3).sum(0).to(x.dtype)
