"""AdamW on a flat share: decoupled weight decay (arXiv:1711.05101). All arithmetic in the master weights' dtype."""

from __future__ import annotations

from torch import Tensor

from megatrain.config.optimizer import OptimizerConfig
from megatrain.optim.state import ShareState

_CPU_BLOCK = 1 << 18
"""Elements updated at once on a CPU: the block and its temporaries stay in cache, and no fresh memory is touched."""


def adamw_update_(state: ShareState, gradient: Tensor, config: OptimizerConfig, lr: float, num_updates: int) -> None:
    """Update one share in place. `num_updates` counts this one: 1 for the first.

    Shapes: gradient and all state [share_numel].
    """
    if config.weight_decay:
        for run in state.decayed_runs:
            state.master[run].mul_(1.0 - lr * config.weight_decay)
    first_bias = 1.0 - config.beta1**num_updates
    second_bias = 1.0 - config.beta2**num_updates
    whole = max(gradient.numel(), 1)
    size = min(_CPU_BLOCK, whole) if gradient.device.type == "cpu" else whole
    blocks = zip(*(x.split(size) for x in (state.master, gradient, state.exp_avg, state.exp_avg_sq)), strict=True)
    for master, grad, exp_avg, exp_avg_sq in blocks:
        exp_avg.lerp_(grad, 1.0 - config.beta1)
        exp_avg_sq.mul_(config.beta2).addcmul_(grad, grad, value=1.0 - config.beta2)
        denominator = exp_avg_sq.sqrt().div_(second_bias**0.5).add_(config.eps)
        master.addcdiv_(exp_avg, denominator, value=-lr / first_bias)
