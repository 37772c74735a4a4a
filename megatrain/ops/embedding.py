"""Looks up rows of a table by token, and sums the gradients of the rows.

A token of -1 has no row: its result is zeros, and no row gets its gradient. A rank that holds only some rows passes -1
for tokens of rows that other ranks hold. Gradients of equal tokens are summed in fp32 (fp64 for fp64) in the order of
the tokens, rounded once, and ADDED to the caller's table.
Shapes: S sequence, B micro-batch, T tokens (S * B), V rows, H hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.ops.library import (
    declare,
    require_contiguous,
    require_dtype,
    require_floating,
    require_same_device,
    require_shape,
)
from megatrain.ops.main_grad import main_grad_of
from megatrain.ops.precision import accumulate_dtype


def embedding(tokens_SB: Tensor, weight_VH: Tensor) -> Tensor:
    """Return weight[token] for each token, and zeros for -1. Saves the tokens for backward.

    If the weight has a main_grad, backward adds the gradient to it and returns None to autograd.
    """
    return _Embedding.apply(tokens_SB, weight_VH)


def embedding_gradient_(grad_weight_VH: Tensor, tokens_SB: Tensor, grad_SBH: Tensor) -> None:
    """Add each row of `grad` to the row of `grad_weight` with its token's number. Rows with token -1 are skipped.

    grad_weight has grad's dtype, or fp32 (fp64 for fp64). Shapes: tokens any dims, grad the same dims and H.
    """
    _embedding_gradient_op(grad_weight_VH, tokens_SB.flatten(), grad_SBH.flatten(0, -2).contiguous())


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_SB: Tensor, weight_VH: Tensor) -> Tensor:
        tokens_SB = tokens_SB.contiguous()
        ctx.save_for_backward(tokens_SB)
        ctx.main_grad = main_grad_of(weight_VH)
        ctx.shape, ctx.dtype = weight_VH.shape, weight_VH.dtype
        return _embedding_op(tokens_SB, weight_VH.contiguous())

    @staticmethod
    def backward(ctx: Any, grad_SBH: Tensor) -> tuple[None, Tensor | None]:
        (tokens_SB,) = ctx.saved_tensors
        if ctx.main_grad is not None:
            ctx.main_grad.add(partial(_add_gradient, tokens_SB, grad_SBH))
            return None, None
        grad_weight_VH = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad_SBH.device)
        embedding_gradient_(grad_weight_VH, tokens_SB, grad_SBH)
        return None, grad_weight_VH


def _add_gradient(tokens_SB: Tensor, grad_SBH: Tensor, total_VH: Tensor, is_fresh: bool) -> None:
    if is_fresh:
        total_VH.zero_()
    embedding_gradient_(total_VH, tokens_SB, grad_SBH)


def _check_table(name: str, table: Tensor) -> None:
    require_floating(name, table)
    if table.dim() != 2:
        raise RuntimeError(f"{name} must have two dims, got {list(table.shape)}")
    if table.shape[0] > 0x7FFFFFFF or table.shape[1] > 0x3FFFFFFF:
        raise RuntimeError(f"{name} must have less than 2^31 rows of less than 2^30 elements, got {list(table.shape)}")
    require_contiguous(name, table)


def _check_tokens(tokens: Tensor, other_name: str, other: Tensor) -> None:
    require_same_device("tokens", tokens, other_name, other)
    require_dtype("tokens", tokens, torch.int64)
    require_contiguous("tokens", tokens)


def _check_embedding(tokens: Tensor, weight: Tensor) -> None:
    _check_table("weight", weight)
    _check_tokens(tokens, "weight", weight)


def _check_gradient(grad_weight: Tensor, tokens: Tensor, grad: Tensor) -> None:
    _check_table("grad_weight", grad_weight)
    _check_tokens(tokens, "grad_weight", grad_weight)
    if tokens.dim() != 1:
        raise RuntimeError(f"tokens must have one dim, got {list(tokens.shape)}")
    require_same_device("grad", grad, "grad_weight", grad_weight)
    require_floating("grad", grad)
    require_shape("grad", grad, (tokens.shape[0], grad_weight.shape[1]))
    require_contiguous("grad", grad)
    if grad_weight.dtype != grad.dtype:
        require_dtype("grad_weight", grad_weight, accumulate_dtype(grad.dtype))


def _reference_embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    is_absent = tokens == -1
    # for -1, look up row 0 and then write zeros; torch rejects tokens below -1
    return functional.embedding(tokens + is_absent, weight).masked_fill_(is_absent.unsqueeze(-1), 0.0)


def _reference_gradient_(grad_weight: Tensor, tokens: Tensor, grad: Tensor) -> None:
    # torch sums in grad's dtype on CPUs: in bf16 the sum for a token that occurs 3,000 times is 10 % wrong
    wide = grad.to(accumulate_dtype(grad.dtype))
    grad_weight.add_(torch.ops.aten.embedding_dense_backward(wide, tokens, grad_weight.shape[0], -1, False))


_embedding_op = declare(
    "embedding(Tensor tokens, Tensor weight) -> Tensor",
    check=_check_embedding,
    reference=_reference_embedding,
    fake=lambda tokens, weight: weight.new_empty((*tokens.shape, weight.shape[1])),
)
_embedding_gradient_op = declare(
    "embedding_gradient_(Tensor(a!) grad_weight, Tensor tokens, Tensor grad) -> ()",
    check=_check_gradient,
    reference=_reference_gradient_,
    fake=lambda *_: None,
)
