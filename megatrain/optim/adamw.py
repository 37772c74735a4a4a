"""AdamW on a flat share: decoupled weight decay (arXiv:1711.05101). All arithmetic in the master weights' dtype."""

from __future__ import annotations

from torch import Tensor

from megatrain.config.optimizer import OptimizerConfig
from megatrain.optim.state import ShareState


def adamw_update_(state: ShareState, gradient: Tensor, config: OptimizerConfig, lr: float, num_updates: int) -> None:
    """Update one share in place. `num_updates` counts this one: 1 for the first.

    Shapes: gradient and all state [share_numel].
    """
    exp_avg, exp_avg_sq = state.exp_avg, state.exp_avg_sq
    exp_avg.lerp_(gradient, 1.0 - config.beta1)
    exp_avg_sq.mul_(config.beta2).addcmul_(gradient, gradient, value=1.0 - config.beta2)
    denominator = exp_avg_sq.sqrt().div_((1.0 - config.beta2**num_updates) ** 0.5).add_(config.eps)
    if config.weight_decay:
        for run in state.decayed_runs:
            state.master[run].mul_(1.0 - lr * config.weight_decay)
    state.master.addcdiv_(exp_avg, denominator, value=-lr / (1.0 - config.beta1**num_updates))
