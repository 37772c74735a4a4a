"""Optimizers over flat shards, the gradient norm, and learning-rate schedules."""

from megatrain.optim.learning_rate import learning_rate
from megatrain.optim.sharded import ShardedOptimizer

__all__ = ["ShardedOptimizer", "learning_rate"]
