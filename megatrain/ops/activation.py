"""The non-linearities of the MLP. Shapes: S sequence, B micro-batch, F ffn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def gelu(x_SBF: Tensor) -> Tensor:
    """Return gelu(x) by the tanh approximation (GPT-2's). Saves x for backward."""
    return functional.gelu(x_SBF, approximate="tanh")


def swiglu(x_SB2F: Tensor) -> Tensor:
    """Return silu(gate) * up, where x holds gate and up. Saves x for backward, nothing else.

    Shapes: x [S, B, 2, F]; result [S, B, F].
    """
    return _SwiGlu.apply(x_SB2F)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SB2F: Tensor) -> Tensor:
        ctx.save_for_backward(x_SB2F)
        gate, up = x_SB2F.unbind(-2)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad_SBF: Tensor) -> Tensor:
        (x_SB2F,) = ctx.saved_tensors
        gate, up = x_SB2F.unbind(-2)
        grad_x = torch.empty_like(x_SB2F)
        grad_gate, grad_up = grad_x.unbind(-2)
        # four passes, each written where its result belongs: no temporary of the activation's size
        torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad_SBF)
        torch.ops.aten.silu_backward.grad_input(grad_SBF, gate, grad_input=grad_gate).mul_(up)
        return grad_x
