"""The operators of optimizer_step.py in torch operations. On CPUs they compute block by block, to stay in the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megatrain.ops.library import OPTIMIZER_BLOCK_ELEMENTS_ON_CPU
from megatrain.ops.square_sums import reference_square_sum


def reference_adamw(
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    published: Tensor | None,
    run_borders: Tensor,
    is_decayed: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction1: float,
    bias_correction2: float,
    gradient_scale: float,
) -> None:
    """Update the weights, as `adamw_`."""
    decayed = _decayed_runs(run_borders, is_decayed)
    for block, scratch in _blocks(master):
        for run in decayed if weight_decay else ():
            master[_common(run, block)].mul_(1.0 - lr * weight_decay)
        denominator = _update_moments(
            grad[block], exp_avg[block], exp_avg_sq[block], scratch, beta1, beta2, eps, bias_correction2, gradient_scale
        )
        master[block].addcdiv_(exp_avg[block], denominator, value=-lr / bias_correction1)
        if published is not None:
            published[block].copy_(master[block])


def reference_lamb_direction(
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    run_borders: Tensor,
    is_decayed: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction1: float,
    bias_correction2: float,
    gradient_scale: float,
) -> Tensor:
    """Return the sums of squares of each run's weights and direction, as `lamb_direction_`."""
    decayed = _decayed_runs(run_borders, is_decayed)
    for block, scratch in _blocks(master):
        denominator = _update_moments(
            grad[block], exp_avg[block], exp_avg_sq[block], scratch, beta1, beta2, eps, bias_correction2, gradient_scale
        )
        torch.div(exp_avg[block], bias_correction1, out=grad[block]).div_(denominator)
        for run in decayed if weight_decay else ():
            both = _common(run, block)
            grad[both].add_(master[both], alpha=weight_decay)
    return run_square_sums(master, grad, run_borders)


def run_square_sums(master: Tensor, direction: Tensor, run_borders: Tensor) -> Tensor:
    """Return the sums of squares of each run's weights and direction. Shapes: result [R, 2], fp64."""
    sums = torch.zeros(run_borders.numel() - 1, 2, dtype=torch.float64, device=master.device)
    for of_run, run in zip(sums, _runs(run_borders), strict=True):
        if run.start < run.stop:
            of_run[0], of_run[1] = reference_square_sum(master[run]), reference_square_sum(direction[run])
    return sums


def reference_lamb_apply(
    direction: Tensor, master: Tensor, published: Tensor | None, run_borders: Tensor, ratios: Tensor, lr: float
) -> None:
    """Update the weights along the direction, as `lamb_apply_`."""
    for ratio, run in zip([*ratios.tolist(), 1.0], [*_runs(run_borders), _padding(run_borders)], strict=True):
        for block, scratch in _blocks(master[run]):
            torch.mul(direction[run][block], ratio, out=scratch)
            master[run][block].add_(scratch, alpha=-lr)
    if published is not None:
        published.copy_(master)


def _update_moments(
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scratch: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    bias_correction2: float,
    gradient_scale: float,
) -> Tensor:
    """Update both moments, and return in `scratch` the denominator of the first moment."""
    if grad.dtype == scratch.dtype:
        scaled = torch.mul(grad, gradient_scale, out=scratch)
    else:  # a product of a bf16 tensor and a number would be rounded to bf16
        scaled = scratch.copy_(grad).mul_(gradient_scale)
    if beta1 == 0.0:  # lerp_ would replace a -0 by 0, or not, depending on its place in the block
        exp_avg.copy_(scaled)
    else:
        exp_avg.lerp_(scaled, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(scaled, scaled, value=1.0 - beta2)
    return _square_root(exp_avg_sq, scratch).div_(math.sqrt(bias_correction2)).add_(eps)


def _square_root(values: Tensor, out: Tensor) -> Tensor:
    """Write the root of `values`, rounded as IEEE 754 requires, to `out`. Both are contiguous.

    torch's own root is that of MKL on CPUs, which is one unit in the last place away for a fifth of the fp32 numbers
    that were tried, and may differ between processors.
    """
    if values.device.type != "cpu":
        return torch.sqrt(values, out=out)
    with np.errstate(invalid="ignore"):
        np.sqrt(values.numpy(), out=out.numpy())
    return out


def _blocks(flat: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks that cover `flat`, each with scratch memory of its length. All blocks share the scratch memory."""
    whole = max(flat.numel(), 1)
    size = min(OPTIMIZER_BLOCK_ELEMENTS_ON_CPU, whole) if flat.device.type == "cpu" else whole
    scratch = torch.empty(size, dtype=flat.dtype, device=flat.device)
    for start in range(0, flat.numel(), size):
        block = slice(start, min(start + size, flat.numel()))
        yield block, scratch[: block.stop - block.start]


def _runs(run_borders: Tensor) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(run_borders.tolist())]


def _padding(run_borders: Tensor) -> slice:
    return slice(int(run_borders[-1]), None)


def _decayed_runs(run_borders: Tensor, is_decayed: Tensor) -> list[slice]:
    """Return the runs to decay, with adjacent runs joined, so that one call decays them."""
    joined: list[slice] = []
    for run, decays in zip(_runs(run_borders), is_decayed.tolist(), strict=True):
        if not decays or run.start == run.stop:
            continue
        if joined and joined[-1].stop == run.start:
            joined[-1] = slice(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return joined


def _common(run: slice, block: slice) -> slice:
    start = max(run.start, block.start)
    return slice(start, max(start, min(run.stop, block.stop)))
