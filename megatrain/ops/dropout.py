"""Dropout with a mask that depends only on a key and the token's number: the same in every layout and recomputation.

The addition of a bias before dropout and of the residual stream after it can be fused. Arithmetic is in fp32 (fp64 for
fp64), and the result is rounded once.
Shapes: S sequence, B micro-batch, H hidden (any dims may come before H).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatrain import rng
from megatrain.ops.library import (
    declare,
    require_contiguous,
    require_dtype,
    require_floating,
    require_like,
    require_same_device,
    require_same_kind,
    require_shape,
)
from megatrain.ops.precision import accumulate_dtype


def dropout(x_SBH: Tensor, probability: float, key: tuple[int, int], token_SB: Tensor) -> Tensor:
    """Zero each element with `probability` and scale the rest by 1 / (1 - probability).

    Saves only token_SB for backward, which draws the mask again.
    Shapes: x [S, B, H]; token_SB [S, B] int64, the global number of each token.
    """
    return _Dropout.apply(x_SBH, probability, key, token_SB)


def residual_dropout(
    x_SBH: Tensor,
    y_SBH: Tensor,
    bias_H: Tensor | None,
    probability: float,
    key: tuple[int, int],
    token_SB: Tensor | None,
) -> Tensor:
    """Return x + dropout(y + bias). With probability 0 no mask is drawn, and token_SB may be None.

    Saves only token_SB for backward, and only if a mask is drawn.
    Shapes: x, y and result [S, B, H]; token_SB the same as for dropout().
    """
    return _ResidualDropout.apply(x_SBH, y_SBH, bias_H, probability, key, token_SB)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SBH: Tensor, probability: float, key: tuple[int, int], token_SB: Tensor) -> Tensor:
        ctx.probability, ctx.key = probability, key
        ctx.save_for_backward(token_SB)
        return _residual_dropout_op(None, x_SBH.contiguous(), None, token_SB, probability, *key)

    @staticmethod
    def backward(ctx: Any, grad_SBH: Tensor) -> tuple[Tensor, None, None, None]:
        (token_SB,) = ctx.saved_tensors
        grad_x = _residual_dropout_op(None, grad_SBH.contiguous(), None, token_SB, ctx.probability, *ctx.key)
        return grad_x, None, None, None


class _ResidualDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SBH: Tensor,
        y_SBH: Tensor,
        bias_H: Tensor | None,
        probability: float,
        key: tuple[int, int],
        token_SB: Tensor | None,
    ) -> Tensor:
        ctx.probability, ctx.key, ctx.has_bias = probability, key, bias_H is not None
        token_SB = token_SB if probability else None
        ctx.save_for_backward(token_SB)
        return _residual_dropout_op(x_SBH.contiguous(), y_SBH.contiguous(), bias_H, token_SB, probability, *key)

    @staticmethod
    def backward(ctx: Any, grad_SBH: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        (token_SB,) = ctx.saved_tensors
        grad_SBH = grad_SBH.contiguous()
        grad_y, grad_bias = grad_SBH, None
        if token_SB is None:
            grad_bias = _bias_backward_op(grad_SBH) if ctx.has_bias else None
        elif ctx.has_bias:
            grad_y, grad_bias = _bias_dropout_backward_op(grad_SBH, token_SB, ctx.probability, *ctx.key)
        else:
            grad_y = _residual_dropout_op(None, grad_SBH, None, token_SB, ctx.probability, *ctx.key)
        return grad_SBH, grad_y, grad_bias, None, None, None


def _check_forward(
    residual: Tensor | None,
    y: Tensor,
    bias: Tensor | None,
    token: Tensor | None,
    probability: float,
    first_key: int,
    second_key: int,
) -> None:
    _check_rows("y", y)
    if residual is not None:
        require_like("residual", residual, "y", y)
        require_contiguous("residual", residual)
    if bias is not None:
        require_same_kind("bias", bias, "y", y)
        require_shape("bias", bias, y.shape[-1:])
        require_contiguous("bias", bias)
    _check_draw("y", y, token, probability)


def _check_backward(grad_out: Tensor, token: Tensor, probability: float, first_key: int, second_key: int) -> None:
    _check_rows("grad_out", grad_out)
    _check_draw("grad_out", grad_out, token, probability)


def _check_rows(name: str, x: Tensor) -> None:
    require_floating(name, x)
    if x.dim() < 1:
        raise RuntimeError(f"{name} must have at least one dim, got {list(x.shape)}")
    require_contiguous(name, x)


def _check_draw(name: str, x: Tensor, token: Tensor | None, probability: float) -> None:
    if not 0 <= probability < 1:
        raise RuntimeError(f"probability must be at least 0 and less than 1, got {probability}")
    if token is None:
        if probability:
            raise RuntimeError("token must be given where probability is not 0")
        return
    require_same_device("token", token, name, x)
    require_dtype("token", token, torch.int64)
    if token.shape != x.shape[:-1]:
        raise RuntimeError(
            f"token must have one number for each row of {name}, {list(x.shape)}, got {list(token.shape)}"
        )
    require_contiguous("token", token)


def _reference_forward(
    residual: Tensor | None,
    y: Tensor,
    bias: Tensor | None,
    token: Tensor | None,
    probability: float,
    first_key: int,
    second_key: int,
) -> Tensor:
    accumulate = accumulate_dtype(y.dtype)
    out = y.to(accumulate, copy=True) if bias is None else y.to(accumulate) + bias
    if token is not None:
        is_dropped = rng.keep_mask((first_key, second_key), probability, token, y.shape[-1]).logical_not_()
        out.mul_(1.0 / (1.0 - probability)).masked_fill_(is_dropped, 0.0)
    if residual is not None:
        out.add_(residual)
    return out.to(y.dtype)


def _reference_backward(
    grad_out: Tensor, token: Tensor, probability: float, first_key: int, second_key: int
) -> tuple[Tensor, Tensor]:
    wide = grad_out.to(accumulate_dtype(grad_out.dtype))
    grad_y = _reference_forward(None, wide, None, token, probability, first_key, second_key)
    return grad_y.to(grad_out.dtype), _reference_bias_backward(grad_y).to(grad_out.dtype)


def _reference_bias_backward(grad_out: Tensor) -> Tensor:
    return grad_out.flatten(0, -2).sum(0, dtype=accumulate_dtype(grad_out.dtype)).to(grad_out.dtype)


_residual_dropout_op = declare(
    "residual_dropout(Tensor? residual, Tensor y, Tensor? bias, Tensor? token, float probability, int first_key, "
    "int second_key) -> Tensor",
    check=_check_forward,
    reference=_reference_forward,
    fake=lambda residual, y, bias, token, probability, first_key, second_key: torch.empty_like(y),
)
_bias_dropout_backward_op = declare(
    "bias_dropout_backward(Tensor grad_out, Tensor token, float probability, int first_key, int second_key) "
    "-> (Tensor grad_y, Tensor grad_bias)",
    check=_check_backward,
    reference=_reference_backward,
    fake=lambda grad_out, token, probability, first_key, second_key: (
        torch.empty_like(grad_out),
        grad_out.new_empty(grad_out.shape[-1:]),
    ),
)
_bias_backward_op = declare(
    "bias_backward(Tensor grad_out) -> Tensor",
    check=lambda grad_out: _check_rows("grad_out", grad_out),
    reference=_reference_bias_backward,
    fake=lambda grad_out: grad_out.new_empty(grad_out.shape[-1:]),
)
