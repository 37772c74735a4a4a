"""Runs a function of tensors and saves only its inputs for backward, which runs the function again.

For operations without a compiled kernel: autograd differentiates the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Tensor]


def recomputed(function: Function, *inputs: Tensor | None) -> Tensor:
    """Return function(*inputs). Saves the inputs for backward, and nothing else."""
    return _Recomputed.apply(function, *inputs)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Function, *inputs: Tensor | None) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [None if tensor is None else tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            result = ctx.function(*inputs)
        grads = iter(torch.autograd.grad(result, [tensor for tensor in inputs if tensor is not None], grad))
        return None, *(None if tensor is None else next(grads) for tensor in inputs)
