"""AdamW on a flat shard: decoupled weight decay (arXiv:1711.05101). All arithmetic is in the master weights' dtype."""

from __future__ import annotations

from torch import Tensor

from megatrain.config.optimizer import OptimizerConfig
from megatrain.ops.optimizer_step import adamw_
from megatrain.optim.state import ShardState


def adamw_update_(
    state: ShardState, gradient: Tensor, config: OptimizerConfig, lr: float, num_updates: int, gradient_scale: float
) -> None:
    """Update one shard of state in place with gradients times `gradient_scale`, and its parameters too.

    num_updates: the number of this update; the first is 1. Shapes: gradient and all state [shard_numel].
    """
    adamw_(
        gradient,
        state.master,
        state.of("exp_avg"),
        state.of("exp_avg_sq"),
        state.published,
        state.run_borders,
        state.is_decayed,
        lr=lr * state.rule.lr_scale,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=state.rule.weight_decay,
        num_updates=num_updates,
        gradient_scale=gradient_scale,
    )
