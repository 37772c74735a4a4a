"""Softmax cross entropy over a vocabulary that may be spread over ranks, in two local passes.

Pass 1 gives each token's log-sum-exp and target logit over the LOCAL columns; whoever owns the ranks combines those two
numbers a token (megatrain.parallel does, the single device has nothing to combine); pass 2 writes the gradient in
place of the logits. Logits are never gathered and no second tensor of their size stays alive.
Shapes: T tokens (S * B), V local vocabulary columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatrain.ops.block_elements import LOSS_BLOCK_ELEMENTS
from megatrain.ops.precision import accumulate_dtype

IGNORED_LABEL = -100

Combine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Makes (log-sum-exp, target logit) of the local columns those of the whole vocabulary. Shapes: all [T]."""


def summed_cross_entropy(
    logits_TV: Tensor, labels_T: Tensor, vocab_size: int, *, first_column: int = 0, combine: Combine | None = None
) -> Tensor:
    """Return the summed loss of the tokens whose label is not ignored, fp32 (fp64 for fp64 logits).

    Backward overwrites the logits: they must have no other use. `combine` is for logits that are some columns only.
    Shapes: logits [T, V]; labels [T]; result scalar.
    """
    return _SummedCrossEntropy.apply(logits_TV, labels_T, vocab_size, first_column, combine)


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, vocab_size: int, first_column: int, combine: Combine | None
    ) -> Tensor:
        lse_T, target_T = local_statistics(logits_TV, labels_T, first_column, vocab_size)
        if combine is not None:
            lse_T, target_T = combine(lse_T, target_T)
        ctx.first_column = first_column
        ctx.save_for_backward(logits_TV, labels_T, lse_T)
        return ((lse_T - target_T) * (labels_T != IGNORED_LABEL)).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits_TV, labels_T, lse_T = ctx.saved_tensors
        grad_T = grad * (labels_T != IGNORED_LABEL)
        return logits_gradient_(logits_TV, labels_T, lse_T, grad_T, ctx.first_column), None, None, None, None


def local_statistics(logits_TV: Tensor, labels_T: Tensor, first_column: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Pass 1: return (log-sum-exp, target logit) over the local columns, fp32 (fp64 for fp64 logits).

    Columns at or past `vocab_size` (padding) are set to -inf in place. A token whose label is not among the local
    columns has target 0, so that summing over ranks gives the target.
    Shapes: logits [T, V]; labels [T]; results [T].
    """
    num_real = min(max(vocab_size - first_column, 0), logits_TV.shape[1])
    logits_TV[:, num_real:] = float("-inf")
    accumulate = accumulate_dtype(logits_TV.dtype)
    if num_real == 0:  # this rank holds padding only
        lse_T = torch.full(labels_T.shape, float("-inf"), dtype=accumulate, device=logits_TV.device)
        return lse_T, torch.zeros_like(lse_T)
    lse_T = torch.cat([torch.logsumexp(block.to(accumulate), dim=-1) for block in logits_TV.split(_rows(logits_TV))])
    column_T = labels_T - first_column
    is_local_T = (column_T >= 0) & (column_T < num_real)
    target_T = logits_TV.gather(1, column_T.clamp(0, num_real - 1)[:, None])[:, 0].to(accumulate)
    return lse_T, target_T * is_local_T


def logits_gradient_(logits_TV: Tensor, labels_T: Tensor, lse_T: Tensor, grad_T: Tensor, first_column: int) -> Tensor:
    """Pass 2: overwrite logits with d loss / d logits = (softmax - onehot) * grad, given the GLOBAL log-sum-exp.

    Shapes: logits [T, V]; the others [T]; grad is 0 where the label is ignored.
    """
    column_T1 = (labels_T - first_column)[:, None]
    is_local_T1 = (column_T1 >= 0) & (column_T1 < logits_TV.shape[1])
    accumulate = accumulate_dtype(logits_TV.dtype)
    onehot_T1 = is_local_T1.to(accumulate).neg_()
    column_T1 = column_T1.clamp(0, logits_TV.shape[1] - 1)
    rows = _rows(logits_TV)
    for first in range(0, logits_TV.shape[0], rows):
        part = slice(first, first + rows)
        block = logits_TV[part]
        # in place where the dtype allows, else one block of fp32 at a time: bf16 differences would cost 3 % of exp
        grad = block if block.dtype == accumulate else block.to(accumulate)
        grad.sub_(lse_T[part, None]).exp_().scatter_add_(1, column_T1[part], onehot_T1[part]).mul_(grad_T[part, None])
        if grad is not block:
            block.copy_(grad)
    return logits_TV


def _rows(logits_TV: Tensor) -> int:
    """Return how many tokens to treat at once, so that temporaries stay at some MB."""
    return max(1, LOSS_BLOCK_ELEMENTS // max(1, logits_TV.shape[1]))
