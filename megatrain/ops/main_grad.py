"""A parameter's main_grad: the sum of its gradients over the micro-batches of a step. Backward adds to it directly.

This saves a tensor of the weight's size, a pass over the sum, and, in half precision, the rounding of each
micro-batch's gradient before it is added (fused wgrad accumulation). Data parallelism sets a parameter's main_grad.
Operations that support main_grads look them up; all others return gradients to autograd. A main_grad may compute a
wgrad later, because no dgrad depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

_ATTRIBUTE = "_megatrain_main_grad"
"""Not `main_grad`: Transformer Engine has an attribute of that name with another meaning."""

Addition = Callable[[Tensor, bool], object]
"""Adds one micro-batch's gradient to a sum, given the sum's memory (in the parameter's shape) and whether it is fresh.

If the memory is fresh, its content is arbitrary and must be overwritten. Otherwise the gradient must be added to it.
"""


class MainGrad(Protocol):
    """The sum of one parameter's gradients over the micro-batches of a step."""

    def add(self, add: Addition) -> None:
        """Call `add` with the sum's memory before this method returns."""

    def add_wgrad(self, add: Addition) -> None:
        """Call `add`, which adds a wgrad, now or later. Wgrads are added in the order of the calls of this method.

        Until then the main_grad keeps `add` and all tensors that `add` refers to. These must be only the operands of
        the wgrad. They must not change, and must have no autograd history, which would keep the graph alive.
        """


def set_main_grad(parameter: nn.Parameter, main_grad: MainGrad) -> None:
    """Make operations add the gradients of `parameter` to `main_grad`."""
    setattr(parameter, _ATTRIBUTE, main_grad)


def main_grad_of(tensor: Tensor) -> MainGrad | None:
    """Return the main_grad of a parameter, or None if it has none."""
    return getattr(tensor, _ATTRIBUTE, None)
