"""LayerNorm and RMSNorm over the hidden dim, with or without the addition to the residual stream before them.

Statistics are in fp32 (fp64 for fp64), and the result is rounded once to x's dtype. x, weight and bias have the same
dtype. A sum of x and residual is rounded before it is normalized, so that backward can recompute the norm from the
saved sum.
Shapes: S sequence, B micro-batch, H hidden (any dims may come before H).

Between two norms, the residual stream is a pair: hidden states, and the output of the last branch, which is not added
yet. The next norm adds them, because it reads both anyway. That saves one pass over memory in forward and two in
backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.ops.host_rms_norm import compiled_rms_norm, host_add_rms_norm, host_rms_norm, host_rms_norm_backward
from megatrain.ops.library import (
    HostImplementation,
    declare,
    require_contiguous,
    require_dtype,
    require_floating,
    require_like,
    require_same_device,
    require_same_kind,
    require_shape,
)
from megatrain.ops.normalization_reference import (
    reference_add_layer_norm,
    reference_add_rms_norm,
    reference_layer_norm,
    reference_layer_norm_backward,
    reference_rms_norm,
    reference_rms_norm_backward,
)
from megatrain.ops.precision import accumulate_dtype


def rms_norm(x_SBH: Tensor, weight_H: Tensor, eps: float, added_SBH: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return total / sqrt(mean(total^2) + eps) * weight over H, and total = x + added (x itself without `added`).

    Saves total and one number per token for backward, which adds the gradients of both results in the same pass.
    """
    return _RmsNorm.apply(x_SBH, added_SBH, weight_H, eps, False)


def layer_norm(
    x_SBH: Tensor, weight_H: Tensor, bias_H: Tensor, eps: float, added_SBH: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (total - mean) / sqrt(var + eps) * weight + bias over H, and total = x + added (x itself without `added`).

    Saves total and two numbers per token for backward, which adds the gradients of both results in the same pass.
    """
    return _LayerNorm.apply(x_SBH, added_SBH, weight_H, bias_H, eps)


def zero_centered_rms_norm(
    x_SBH: Tensor, weight_H: Tensor, eps: float, added_SBH: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return rms_norm() with the scale 1 + weight, which is computed and applied in fp32 (fp64 for fp64).

    There is no compiled kernel. Saves the same for backward as rms_norm().
    """
    return _RmsNorm.apply(x_SBH, added_SBH, weight_H, eps, True)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_SBH: Tensor, added_SBH: Tensor | None, weight_H: Tensor, eps: float, is_zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        # kernels support only scales of x's dtype, so the wider 1 + weight needs the plain torch form
        norm = reference_rms_norm if is_zero_centered else _rms_norm_op
        add_norm = reference_add_rms_norm if is_zero_centered else _add_rms_norm_op
        scale_H = _one_plus(weight_H) if is_zero_centered else weight_H
        total_SBH = x_SBH.contiguous()
        if added_SBH is None:
            out_SBH, rstd_SB1 = norm(total_SBH, scale_H, eps)
        else:
            out_SBH, total_SBH, rstd_SB1 = add_norm(total_SBH, added_SBH.contiguous(), scale_H, eps)
        ctx.save_for_backward(total_SBH, weight_H, rstd_SB1)
        ctx.has_added, ctx.is_zero_centered = added_SBH is not None, is_zero_centered
        return out_SBH, total_SBH

    @staticmethod
    def backward(
        ctx: Any, grad_SBH: Tensor | None, grad_total_SBH: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        if grad_SBH is None:  # the norm's result was not used
            return grad_total_SBH, grad_total_SBH if ctx.has_added else None, None, None, None
        total_SBH, weight_H, rstd_SB1 = ctx.saved_tensors
        norm_backward = reference_rms_norm_backward if ctx.is_zero_centered else _rms_norm_backward_op
        scale_H = _one_plus(weight_H) if ctx.is_zero_centered else weight_H
        grad_x_SBH, grad_weight_H = norm_backward(
            grad_SBH.contiguous(), _contiguous(grad_total_SBH), total_SBH, scale_H, rstd_SB1
        )
        return grad_x_SBH, grad_x_SBH if ctx.has_added else None, grad_weight_H.to(weight_H.dtype), None, None


def _one_plus(weight_H: Tensor) -> Tensor:
    return 1 + weight_H.to(accumulate_dtype(weight_H.dtype))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_SBH: Tensor, added_SBH: Tensor | None, weight_H: Tensor, bias_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        total_SBH = x_SBH.contiguous()
        if added_SBH is None:
            out_SBH, mean_SB1, rstd_SB1 = _layer_norm_op(total_SBH, weight_H, bias_H, eps)
        else:
            out_SBH, total_SBH, mean_SB1, rstd_SB1 = _add_layer_norm_op(
                total_SBH, added_SBH.contiguous(), weight_H, bias_H, eps
            )
        ctx.save_for_backward(total_SBH, weight_H, mean_SB1, rstd_SB1)
        ctx.has_added = added_SBH is not None
        return out_SBH, total_SBH

    @staticmethod
    def backward(
        ctx: Any, grad_SBH: Tensor | None, grad_total_SBH: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        if grad_SBH is None:  # the norm's result was not used
            return grad_total_SBH, grad_total_SBH if ctx.has_added else None, None, None, None
        grad_x_SBH, grad_weight_H, grad_bias_H = _layer_norm_backward_op(
            grad_SBH.contiguous(), _contiguous(grad_total_SBH), *ctx.saved_tensors
        )
        return grad_x_SBH, grad_x_SBH if ctx.has_added else None, grad_weight_H, grad_bias_H, None


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _check_forward(x: Tensor, *others: Tensor | float) -> None:
    require_floating("x", x)
    if x.dim() < 1:
        raise RuntimeError(f"x must have at least one dim, got {list(x.shape)}")
    if x.shape[-1] >= 1 << 30:
        raise RuntimeError(f"x must have rows of less than 2^30 elements, got {list(x.shape)}")
    require_contiguous("x", x)
    for name, tensor in zip(
        ("weight", "bias"), [norm_tensor for norm_tensor in others if isinstance(norm_tensor, Tensor)], strict=False
    ):
        require_same_kind(name, tensor, "x", x)
        require_shape(name, tensor, x.shape[-1:])
        require_contiguous(name, tensor)


def _check_add_forward(x: Tensor, residual: Tensor, *others: Tensor | float) -> None:
    _check_forward(x, *others)
    require_like("residual", residual, "x", x)
    require_contiguous("residual", residual)


def _check_backward(grad_out: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, *statistics: Tensor) -> None:
    _check_forward(x, weight)
    for name, grad in (("grad_out", grad_out), ("grad_sum", grad_sum)):
        if grad is not None:
            require_like(name, grad, "x", x)
            require_contiguous(name, grad)
    for name, tensor in zip(("rstd", "mean"), reversed(statistics), strict=False):
        require_same_device(name, tensor, "x", x)
        require_dtype(name, tensor, accumulate_dtype(x.dtype))
        require_contiguous(name, tensor)
        if tensor.shape != (*x.shape[:-1], 1):
            raise RuntimeError(
                f"{name} must have one number for each row of x, {list(x.shape)}, got {list(tensor.shape)}"
            )


def _empty_statistic(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=accumulate_dtype(x.dtype))


_rms_norm_op = declare(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor out, Tensor rstd)",
    check=_check_forward,
    reference=reference_rms_norm,
    host=HostImplementation(compiled_rms_norm, host_rms_norm),
    fake=lambda x, weight, eps: (torch.empty_like(x), _empty_statistic(x)),
)
_add_rms_norm_op = declare(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor out, Tensor sum, Tensor rstd)",
    check=_check_add_forward,
    reference=reference_add_rms_norm,
    host=HostImplementation(compiled_rms_norm, host_add_rms_norm),
    fake=lambda x, residual, weight, eps: (torch.empty_like(x), torch.empty_like(x), _empty_statistic(x)),
)
_rms_norm_backward_op = declare(
    "rms_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor x, Tensor weight, Tensor rstd) "
    "-> (Tensor grad_x, Tensor grad_weight)",
    check=_check_backward,
    reference=reference_rms_norm_backward,
    host=HostImplementation(compiled_rms_norm, host_rms_norm_backward),
    fake=lambda grad_out, grad_sum, x, weight, rstd: (torch.empty_like(x), torch.empty_like(weight)),
)
_layer_norm_op = declare(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor out, Tensor mean, Tensor rstd)",
    check=_check_forward,
    reference=reference_layer_norm,
    fake=lambda x, weight, bias, eps: (torch.empty_like(x), _empty_statistic(x), _empty_statistic(x)),
)
_add_layer_norm_op = declare(
    "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) "
    "-> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)",
    check=_check_add_forward,
    reference=reference_add_layer_norm,
    fake=lambda x, residual, weight, bias, eps: (
        *(torch.empty_like(x) for _ in range(2)),
        *(_empty_statistic(x) for _ in range(2)),
    ),
)
_layer_norm_backward_op = declare(
    "layer_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor x, Tensor weight, Tensor mean, Tensor rstd) "
    "-> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    check=_check_backward,
    reference=reference_layer_norm_backward,
    fake=lambda grad_out, grad_sum, x, weight, mean, rstd: (
        torch.empty_like(x),
        torch.empty_like(weight),
        torch.empty_like(weight),
    ),
)


class ResidualStream(NamedTuple):
    """The sum x + added, not computed yet. Shapes: both [S, B, H]."""

    x_SBH: Tensor
    added_SBH: Tensor | None = None

    def total(self) -> Tensor:
        """Return the sum."""
        return self.x_SBH if self.added_SBH is None else self.x_SBH + self.added_SBH
