"""Softmax cross entropy over a vocabulary that may be divided among ranks, in two local passes.

Pass 1 reads the LOCAL columns once and returns two or three numbers per token. With tensor parallelism,
megatrain.parallel combines them over ranks. Pass 2 overwrites the logits with their gradient.
Logits are never gathered, and no second tensor of their size stays alive. Sums are in fp32 (fp64 for fp64).
With label smoothing e, the label of a token is 1 - e on its target plus e / vocab_size on every vocabulary entry.
z-loss adds z * lse^2, which keeps lse, the log-sum-exp of the logits, near 0 (PaLM, arXiv:2204.02311, sec. 5).
Shapes: T tokens (S * B), V local vocabulary columns, K statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.contracts.labels import IGNORED_LABEL
from megatrain.ops.library import (
    LOSS_BLOCK_ELEMENTS,
    declare,
    require_contiguous,
    require_dtype,
    require_floating,
    require_same_device,
    require_shape,
)
from megatrain.ops.precision import accumulate_dtype

Observe = Callable[[Tensor], None]
"""A callback that reads the loss of each token, which is 0 if its label is ignored. Shapes: [T]."""

Combine = Callable[[Tensor], Tensor]
"""Combines the statistics of the local columns into those of all columns, maybe in place. Shapes: [K, T]."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The terms that training adds to cross entropy. A term of 0 adds nothing."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0


CROSS_ENTROPY_ALONE = LossTerms()


def summed_cross_entropy(
    logits_TV: Tensor,
    labels_T: Tensor,
    vocab_size: int,
    *,
    first_column: int = 0,
    combine: Combine | None = None,
    terms: LossTerms = CROSS_ENTROPY_ALONE,
    observe: Observe | None = None,
) -> Tensor:
    """Return the summed loss of the tokens whose label is not ignored, fp32 (fp64 for fp64 logits).

    Backward overwrites the logits: they must have no other use. combine: needed if the logits are only some of the
    columns. Columns from `vocab_size` on (padding) are ignored. observe: called once, before the losses are summed.
    Shapes: logits [T, V]; labels [T]; result scalar.
    """
    return _SummedCrossEntropy.apply(logits_TV, labels_T, vocab_size, first_column, combine, terms, observe)


def write_sample_losses(losses_B: Tensor, loss_T: Tensor) -> None:
    """Overwrite `losses_B` with the summed loss of each sample. Shapes: losses [B], any dtype; loss [S * B]."""
    losses_B.copy_(loss_T.view(-1, losses_B.numel()).sum(0, dtype=losses_B.dtype))


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        labels_T: Tensor,
        vocab_size: int,
        first_column: int,
        combine: Combine | None,
        terms: LossTerms,
        observe: Observe | None,
    ) -> Tensor:
        logits_TV, labels_T = logits_TV.contiguous(), labels_T.contiguous()
        statistics_KT = local_statistics(
            logits_TV, labels_T, first_column, vocab_size, has_sum=terms.label_smoothing > 0.0
        )
        if combine is not None:
            statistics_KT = combine(statistics_KT)
        ctx.vocab_size, ctx.first_column, ctx.terms = vocab_size, first_column, terms
        ctx.save_for_backward(logits_TV, labels_T, statistics_KT[0])
        loss_T = token_losses(statistics_KT, labels_T, vocab_size, terms)
        if observe is not None:
            observe(loss_T)
        return loss_T.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, labels_T, lse_T = ctx.saved_tensors
        grad_T = grad.expand(labels_T.shape).contiguous()
        logits_gradient_(logits_TV, labels_T, lse_T, grad_T, ctx.first_column, ctx.vocab_size, ctx.terms)
        return logits_TV.detach(), None, None, None, None, None, None


def local_statistics(
    logits_TV: Tensor, labels_T: Tensor, first_column: int, vocab_size: int, *, has_sum: bool = False
) -> Tensor:
    """Pass 1: return the local columns' log-sum-exp, target logit and, if `has_sum`, sum of the logits.

    The target logit is 0 if the label is not a local column, so that the sum over ranks is the logit of the target.
    Shapes: logits [T, V]; labels [T]; result [2 or 3, T], fp32 (fp64 for fp64 logits).
    """
    return _statistics_op(logits_TV, labels_T, first_column, vocab_size, has_sum)


def token_losses(statistics_KT: Tensor, labels_T: Tensor, vocab_size: int, terms: LossTerms) -> Tensor:
    """Return the loss of each token, 0 where the label is ignored, given the GLOBAL statistics. Shapes: result [T]."""
    lse_T, target_T = statistics_KT[0], statistics_KT[1]
    if terms.label_smoothing > 0.0:
        # the smoothed part of the label belongs to the mean logit over the vocabulary without padding
        target_T = torch.lerp(target_T, statistics_KT[2] / vocab_size, terms.label_smoothing)
    loss_T = lse_T - target_T
    if terms.z_loss > 0.0:
        loss_T.addcmul_(lse_T, lse_T, value=terms.z_loss)
    return loss_T.masked_fill_(labels_T == IGNORED_LABEL, 0.0)


def logits_gradient_(
    logits_TV: Tensor,
    labels_T: Tensor,
    lse_T: Tensor,
    grad_T: Tensor,
    first_column: int,
    vocab_size: int,
    terms: LossTerms = CROSS_ENTROPY_ALONE,
) -> Tensor:
    """Pass 2: overwrite logits with the gradient of sum(loss * grad), given the GLOBAL log-sum-exp.

    Rows of ignored labels and columns of padding become 0. Shapes: logits [T, V]; the others [T].
    """
    _gradient_op(logits_TV, labels_T, lse_T, grad_T, first_column, vocab_size, terms.z_loss, terms.label_smoothing)
    # autograd does not detect this in-place change; the new version makes a second backward an error
    torch.autograd.graph.increment_version(logits_TV)
    return logits_TV


def _check_statistics(logits: Tensor, labels: Tensor, *_: int) -> None:
    require_floating("logits", logits)
    if logits.dim() != 2:
        raise RuntimeError(f"logits must have two dims, got {list(logits.shape)}")
    if logits.shape[0] > 0x7FFFFFFF:
        raise RuntimeError(f"logits must have less than 2^31 rows, got {list(logits.shape)}")
    require_contiguous("logits", logits)
    _require_per_row("labels", labels, torch.int64, logits)


def _check_gradient(logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, *_: float) -> None:
    _check_statistics(logits, labels)
    _require_per_row("lse", lse, accumulate_dtype(logits.dtype), logits)
    _require_per_row("grad", grad, accumulate_dtype(logits.dtype), logits)


def _require_per_row(name: str, tensor: Tensor, dtype: torch.dtype, logits: Tensor) -> None:
    require_same_device(name, tensor, "logits", logits)
    require_dtype(name, tensor, dtype)
    require_shape(name, tensor, logits.shape[:1])
    require_contiguous(name, tensor)


def _reference_statistics(logits: Tensor, labels: Tensor, first_column: int, vocab_size: int, has_sum: bool) -> Tensor:
    accumulate = accumulate_dtype(logits.dtype)
    out = torch.zeros((3 if has_sum else 2, *labels.shape), dtype=accumulate, device=logits.device)
    real = _real_columns(logits, first_column, vocab_size)
    if real.shape[1] == 0:
        out[0].fill_(float("-inf"))
        return out
    for part in _parts(logits):
        block = real[part].to(accumulate)
        out[0, part] = torch.logsumexp(block, dim=-1)
        if has_sum:
            out[2, part] = block.sum(dim=-1)
    column, is_local = _local_targets(real, labels, first_column)
    out[1] = real.gather(1, column[:, None])[:, 0].to(accumulate).masked_fill_(~is_local, 0.0)
    return out


def _reference_gradient_(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    grad: Tensor,
    first_column: int,
    vocab_size: int,
    z_loss: float,
    label_smoothing: float,
) -> None:
    real = _real_columns(logits, first_column, vocab_size)
    logits[:, real.shape[1] :] = 0.0
    if real.shape[1] == 0:
        return
    accumulate = accumulate_dtype(logits.dtype)
    column, is_local = _local_targets(real, labels, first_column)
    of_target = is_local.to(accumulate).mul_(label_smoothing - 1.0)[:, None]
    is_ignored = labels == IGNORED_LABEL
    for part in _parts(logits):
        block = real[part]
        # in place where the dtype allows, else one fp32 block at a time: exp of a difference in bf16 would be 3 % wrong
        wide = block if block.dtype == accumulate else block.to(accumulate)
        wide.sub_(lse[part, None]).exp_()
        if z_loss > 0.0:
            wide.mul_(1.0 + 2.0 * z_loss * lse[part, None])
        if label_smoothing > 0.0:
            wide.sub_(label_smoothing / vocab_size)
        wide.scatter_add_(1, column[part, None], of_target[part]).mul_(grad[part, None])
        # filled, because NaN times 0 would stay NaN; on a GPU the host would wait for the number of rows
        if logits.device.type == "cpu":
            wide[is_ignored[part].nonzero()[:, 0]] = 0.0
        else:
            wide.masked_fill_(is_ignored[part, None], 0.0)
        if wide is not block:
            block.copy_(wide)


def _real_columns(logits: Tensor, first_column: int, vocab_size: int) -> Tensor:
    """Return the view of `logits` without the columns of padding."""
    return logits[:, : max(vocab_size - first_column, 0)]


def _local_targets(real: Tensor, labels: Tensor, first_column: int) -> tuple[Tensor, Tensor]:
    """Return each row's target column, and whether it is local. The column of any other target is arbitrary."""
    column = labels - first_column
    is_local = (column >= 0) & (column < real.shape[1])
    return column.clamp_(0, real.shape[1] - 1), is_local


def _parts(logits: Tensor) -> list[slice]:
    """Return slices of the rows to process at once, so that temporaries take only a few MB."""
    rows = max(1, LOSS_BLOCK_ELEMENTS // max(1, logits.shape[1]))
    return [slice(first, first + rows) for first in range(0, logits.shape[0], rows)]


_statistics_op = declare(
    "cross_entropy_statistics(Tensor logits, Tensor labels, int first_column, int vocab_size, bool has_sum) -> Tensor",
    check=_check_statistics,
    reference=_reference_statistics,
    fake=lambda logits, labels, first_column, vocab_size, has_sum: logits.new_empty(
        (3 if has_sum else 2, logits.shape[0]), dtype=accumulate_dtype(logits.dtype)
    ),
)
_gradient_op = declare(
    "cross_entropy_gradient_(Tensor(a!) logits, Tensor labels, Tensor lse, Tensor grad, int first_column, "
    "int vocab_size, float z_loss, float label_smoothing) -> ()",
    check=_check_gradient,
    reference=_reference_gradient_,
    fake=lambda *_: None,
)
