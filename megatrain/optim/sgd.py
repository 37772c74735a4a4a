"""Stochastic gradient descent with momentum, on a flat shard. Weight decay is decoupled, as in AdamW."""

from __future__ import annotations

from torch import Tensor

from megatrain.config.optimizer import OptimizerConfig
from megatrain.optim.state import ShardState


def sgd_update_(state: ShardState, gradient: Tensor, config: OptimizerConfig, lr: float, gradient_scale: float) -> None:
    """Update one shard of state in place with gradients times `gradient_scale`, and its parameters too.

    The direction overwrites the gradient. Shapes: gradient and all state [shard_numel].
    """
    momentum = state.of("momentum").mul_(config.momentum).add_(gradient.mul_(gradient_scale))
    if config.has_nesterov:
        gradient.add_(momentum, alpha=config.momentum)
    else:
        gradient.copy_(momentum)
    state.move_(gradient, lr)
