"""AdamW and LAMB over a flat shard of the parameters, in place.

The kernel of AdamW reads and writes every tensor once. LAMB takes two passes: its ratios depend on all directions.

Arithmetic is in the master weights' dtype, fp32 or fp64. The update of an element depends only on its own values,
the scalars and the ratio of its parameter (LAMB), so a shard may begin and end anywhere.

A shard holds parameters one after another, then padding. `run_borders` [R + 1], int64 and ascending from 0: parameter r
lies at [run_borders[r], run_borders[r + 1]), which is empty if the shard holds nothing of it. `is_decayed` [R], bool:
whether weight decay applies to parameter r. `published`: the shard of the parameters themselves, in bf16, which gets
the rounded master weights; None if the master weights are the parameters.
Shapes: N elements of the shard, R runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.ops.host_optimizer import host_adamw, host_lamb_direction, step_kernel
from megatrain.ops.library import (
    HostImplementation,
    declare,
    require_contiguous,
    require_dtype,
    require_same_device,
    require_shape,
)
from megatrain.ops.optimizer_reference import reference_adamw, reference_lamb_apply, reference_lamb_direction


def adamw_(
    grad_N: Tensor,
    master_N: Tensor,
    exp_avg_N: Tensor,
    exp_avg_sq_N: Tensor,
    published_N: Tensor | None,
    run_borders: Tensor,
    is_decayed_R: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    num_updates: int,
    gradient_scale: float,
) -> None:
    """Update master weights and moments with grad * gradient_scale; decoupled weight decay (arXiv:1711.05101).

    grad is not changed. It may be bf16 if the rest is fp32. num_updates: the number of this update; the first is 1.
    """
    corrections = 1.0 - beta1**num_updates, 1.0 - beta2**num_updates
    _adamw_op(
        *(grad_N, master_N, exp_avg_N, exp_avg_sq_N, published_N, run_borders, is_decayed_R),
        *(lr, beta1, beta2, eps, weight_decay, *corrections, gradient_scale),
    )
    _mark_changed(master_N, exp_avg_N, exp_avg_sq_N, published_N)


def lamb_direction_(
    grad_N: Tensor,
    master_N: Tensor,
    exp_avg_N: Tensor,
    exp_avg_sq_N: Tensor,
    run_borders: Tensor,
    is_decayed_R: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    num_updates: int,
    gradient_scale: float,
) -> Tensor:
    """Update the moments with grad * gradient_scale, and replace grad by the direction of LAMB (arXiv:1904.00962).

    Shapes: returns [R, 2], fp64: the squared norms of each parameter's weights and direction, 0 for an empty run.
    """
    corrections = 1.0 - beta1**num_updates, 1.0 - beta2**num_updates
    square_sums_R2: Tensor = _lamb_direction_op(
        *(grad_N, master_N, exp_avg_N, exp_avg_sq_N, run_borders, is_decayed_R),
        *(beta1, beta2, eps, weight_decay, *corrections, gradient_scale),
    )
    _mark_changed(grad_N, exp_avg_N, exp_avg_sq_N)
    return square_sums_R2


def lamb_apply_(
    direction_N: Tensor,
    master_N: Tensor,
    published_N: Tensor | None,
    run_borders: Tensor,
    ratios_R: Tensor,
    *,
    lr: float,
) -> None:
    """Move each parameter by -lr * its ratio (fp64) * direction."""
    _lamb_apply_op(direction_N, master_N, published_N, run_borders, ratios_R, lr)
    _mark_changed(master_N, published_N)


def _mark_changed(*tensors: Tensor | None) -> None:
    """Make autograd raise an error in a backward that saved one of these tensors before the change.

    Autograd does not detect the changes by the in-place operators of this module.
    """
    torch.autograd.graph.increment_version([tensor for tensor in tensors if tensor is not None])


def _check_master(master: Tensor) -> None:
    if master.dtype not in (torch.float32, torch.float64):
        raise RuntimeError(f"master must be float32 or float64, got {str(master.dtype).removeprefix('torch.')}")
    if master.dim() != 1:
        raise RuntimeError(f"master must have one dim, got {list(master.shape)}")
    require_contiguous("master", master)


def _check_flat(name: str, tensor: Tensor, master: Tensor, dtype: torch.dtype) -> None:
    require_dtype(name, tensor, dtype)
    require_same_device(name, tensor, "master", master)
    if tensor.shape != master.shape:
        raise RuntimeError(f"{name} must have the shape of master, {list(master.shape)}, got {list(tensor.shape)}")
    require_contiguous(name, tensor)


def _check_published(published: Tensor | None, master: Tensor) -> None:
    if published is None:
        return
    if master.dtype != torch.float32:
        raise RuntimeError("master must be float32 where weights are published, got float64")
    _check_flat("published", published, master, torch.bfloat16)


def _check_borders(run_borders: Tensor, master: Tensor) -> None:
    require_same_device("run_borders", run_borders, "master", master)
    require_dtype("run_borders", run_borders, torch.int64)
    if run_borders.dim() != 1 or run_borders.numel() < 1:
        raise RuntimeError(f"run_borders must have shape [runs + 1], got {list(run_borders.shape)}")
    require_contiguous("run_borders", run_borders)


def _check_per_run(name: str, tensor: Tensor, dtype: torch.dtype, run_borders: Tensor, master: Tensor) -> None:
    require_same_device(name, tensor, "master", master)
    require_dtype(name, tensor, dtype)
    require_shape(name, tensor, [run_borders.numel() - 1])
    require_contiguous(name, tensor)


def _check_adamw(
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    published: Tensor | None,
    run_borders: Tensor,
    is_decayed: Tensor,
    *scalars: float,
) -> None:
    _check_master(master)
    is_narrow = grad.dtype == torch.bfloat16 and master.dtype == torch.float32
    _check_flat("grad", grad, master, grad.dtype if is_narrow else master.dtype)
    _check_flat("exp_avg", exp_avg, master, master.dtype)
    _check_flat("exp_avg_sq", exp_avg_sq, master, master.dtype)
    _check_published(published, master)
    _check_borders(run_borders, master)
    _check_per_run("is_decayed", is_decayed, torch.bool, run_borders, master)


def _check_lamb_direction(
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    run_borders: Tensor,
    is_decayed: Tensor,
    *scalars: float,
) -> None:
    _check_master(master)
    for name, tensor in (("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        _check_flat(name, tensor, master, master.dtype)
    _check_borders(run_borders, master)
    _check_per_run("is_decayed", is_decayed, torch.bool, run_borders, master)


def _check_lamb_apply(
    direction: Tensor, master: Tensor, published: Tensor | None, run_borders: Tensor, ratios: Tensor, lr: float
) -> None:
    _check_master(master)
    _check_flat("direction", direction, master, master.dtype)
    _check_published(published, master)
    _check_borders(run_borders, master)
    _check_per_run("ratios", ratios, torch.float64, run_borders, master)


_adamw_op = declare(
    "adamw_(Tensor grad, Tensor(a!) master, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? published, "
    "Tensor run_borders, Tensor is_decayed, float lr, float beta1, float beta2, float eps, float weight_decay, "
    "float bias_correction1, float bias_correction2, float gradient_scale) -> ()",
    check=_check_adamw,
    reference=reference_adamw,
    host=HostImplementation(step_kernel, host_adamw, (torch.float32, torch.float64, torch.bfloat16)),
    fake=lambda *arguments: None,
)
_lamb_direction_op = declare(
    "lamb_direction_(Tensor(a!) grad, Tensor master, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
    "Tensor run_borders, Tensor is_decayed, float beta1, float beta2, float eps, float weight_decay, "
    "float bias_correction1, float bias_correction2, float gradient_scale) -> Tensor",
    check=_check_lamb_direction,
    reference=reference_lamb_direction,
    host=HostImplementation(step_kernel, host_lamb_direction, (torch.float32, torch.float64)),
    fake=lambda grad, master, exp_avg, exp_avg_sq, run_borders, is_decayed, *scalars: master.new_empty(
        (is_decayed.numel(), 2), dtype=torch.float64
    ),
)
_lamb_apply_op = declare(
    "lamb_apply_(Tensor direction, Tensor(a!) master, Tensor(b!)? published, Tensor run_borders, Tensor ratios, "
    "float lr) -> ()",
    check=_check_lamb_apply,
    reference=reference_lamb_apply,
    fake=lambda *arguments: None,
)
