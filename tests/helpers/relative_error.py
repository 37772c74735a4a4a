"""The tolerance for operations in half precision: the error of plain torch in the same dtype.

The truth is plain torch in fp64 on the same (already rounded) inputs. The allowed error is twice that of plain torch in
that dtype in forward, three times in backward; no tolerance is chosen by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Operation = Callable[..., Tensor]


def forward_and_backward(operation: Operation, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the output, then the gradient of each input."""
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    out = operation(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def assert_no_worse_than_eager(ours: Operation, eager: Operation, inputs: Sequence[Tensor], grad: Tensor) -> None:
    """Compare output and all gradients of `ours` and `eager`, both in the inputs' dtype, with `eager` in fp64."""
    exact = forward_and_backward(eager, [one.double() for one in inputs], grad.double())
    found = forward_and_backward(ours, inputs, grad)
    plain = forward_and_backward(eager, inputs, grad)
    for number, (truth, mine, other) in enumerate(zip(exact, found, plain, strict=True)):
        what = "output" if number == 0 else f"gradient of input {number - 1}"
        assert mine.dtype == other.dtype, what
        assert mine.shape == other.shape, what
        tiny = 1e-7 * truth.abs().max().item() + 1e-30
        for norm in (torch.amax, torch.mean):
            mine_error, other_error = (norm((x.double() - truth).abs()).item() for x in (mine, other))
            assert mine_error <= (2 if number == 0 else 3) * other_error + tiny, (
                f"{what}: off by {mine_error:.3g}, plain torch by {other_error:.3g} ({norm.__name__})"
            )


def assert_same(ours: Operation, reference: Operation, inputs: Sequence[Tensor], grad: Tensor, rtol: float) -> None:
    """Compare output and all gradients; rtol is relative to the largest element (and 1e-15 is nothing)."""
    found = forward_and_backward(ours, inputs, grad)
    expected = forward_and_backward(reference, inputs, grad)
    for number, (mine, truth) in enumerate(zip(found, expected, strict=True)):
        what = "output" if number == 0 else f"gradient of input {number - 1}"
        assert mine.shape == truth.shape, what
        error = (mine - truth).abs().max().item()
        assert error <= rtol * truth.abs().max().item() + 1e-15, f"{what}: off by {error:.3g}"
