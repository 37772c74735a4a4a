"""AdamW on a flat share: decoupled weight decay (arXiv:1711.05101). All arithmetic in the master weights' dtype."""

from __future__ import annotations

from torch import Tensor

from megatrain.config.optimizer import OptimizerConfig
from megatrain.ops.block_elements import ADAMW_BLOCK_ELEMENTS_ON_CPU
from megatrain.optim.state import ShareState


def adamw_update_(
    state: ShareState, gradient: Tensor, config: OptimizerConfig, lr: float, num_updates: int, gradient_scale: float
) -> None:
    """Update one share in place with gradients times `gradient_scale`. `num_updates` counts this one: 1 for the first.

    Shapes: gradient and all state [share_numel].
    """
    whole = max(gradient.numel(), 1)
    size = min(ADAMW_BLOCK_ELEMENTS_ON_CPU, whole) if gradient.device.type == "cpu" else whole
    for start in range(0, gradient.numel(), size):
        block = slice(start, min(start + size, gradient.numel()))
        _update_block_(state, block, gradient[block], config, lr, num_updates, gradient_scale)


def _update_block_(
    state: ShareState,
    block: slice,
    gradient: Tensor,
    config: OptimizerConfig,
    lr: float,
    num_updates: int,
    gradient_scale: float,
) -> None:
    if gradient_scale != 1.0:
        gradient.mul_(gradient_scale)
    for run in state.decayed_runs:
        if config.weight_decay and run.start < block.stop and block.start < run.stop:
            state.master[max(run.start, block.start) : min(run.stop, block.stop)].mul_(1.0 - lr * config.weight_decay)
    exp_avg, exp_avg_sq = state.exp_avg[block], state.exp_avg_sq[block]
    exp_avg.lerp_(gradient, 1.0 - config.beta1)
    exp_avg_sq.mul_(config.beta2).addcmul_(gradient, gradient, value=1.0 - config.beta2)
    denominator = exp_avg_sq.sqrt().div_((1.0 - config.beta2**num_updates) ** 0.5).add_(config.eps)
    state.master[block].addcdiv_(exp_avg, denominator, value=-lr / (1.0 - config.beta1**num_updates))
