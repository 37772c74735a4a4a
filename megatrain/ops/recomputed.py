"""Functions of one tensor that keep only their inputs for backward, which runs them once more.

This is the plain form of an operator that has no kernel of its own: autograd differentiates the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Tensor, Tensor | None], Tensor]


def recomputed(function: Function, x: Tensor, parameter: Tensor | None) -> Tensor:
    """Return function(x, parameter). Saves x and the parameter for backward, and nothing else."""
    return _Recomputed.apply(function, x, parameter)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor, parameter: Tensor | None) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x, parameter)
        return function(x, parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        inputs = [None if one is None else one.detach().requires_grad_() for one in ctx.saved_tensors]
        with torch.enable_grad():
            result = ctx.function(*inputs)
        wanted = [one for one in inputs if one is not None]
        grads = list(torch.autograd.grad(result, wanted, grad))
        return None, grads[0], grads[1] if len(grads) > 1 else None
