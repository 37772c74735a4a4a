"""The sharded optimizer: each rank updates its shard of every bucket in full precision.

The trainer sums the squared gradient norms of all ranks and computes the clipping factor. A step then updates the
shards and rounds them into the parameters, ready for the all-gather.
Source: ZeRO (arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatrain.comm.mesh import Mesh
from megatrain.config.optimizer import OptimizerConfig
from megatrain.ops.optimizer_step import adamw_
from megatrain.ops.square_sums import square_sum
from megatrain.optim.lamb import Lamb
from megatrain.optim.muon import Muon
from megatrain.optim.state import ShardState
from megatrain.parallel.data_parallel import ChunkDataParallel
from megatrain.parallel.sharding import FlatShard


class ShardedOptimizer:
    """State and update of all shards of this rank. `num_updates` counts updates; a skipped step is not an update."""

    def __init__(self, chunks: Sequence[ChunkDataParallel], config: OptimizerConfig, mesh: Mesh) -> None:
        self.config = config
        self.num_updates = 0
        self._chunks = tuple(chunks)
        self.states = [(chunk, ShardState(bucket)) for chunk in chunks for bucket in chunk.buckets]
        of_muon = [state for _, state in self.states if state.rule.name == "muon"]
        self._muon = Muon(of_muon, config, mesh.along) if of_muon else None
        of_lamb = [state for _, state in self.states if state.rule.name == "lamb"]
        self._lamb = Lamb(of_lamb, config, mesh) if of_lamb else None

    def gradient_square_sum(self) -> Tensor:
        """Return this rank's part of the squared gradient norm, in fp64. Only the first holder of a shard counts it."""
        parts = []
        for chunk, state in self.states:
            shard = chunk.gradient_shard(state.bucket)
            for shard_slice in state.bucket.shard_slices():
                part = square_sum(shard[shard_slice.start : shard_slice.stop])
                # not just 0: NaN and infinity times 0 are NaN, so every rank with such a value returns NaN
                parts.append(part if shard_slice.holders.index == 0 else part * 0.0)
        return torch.stack(parts).sum()

    def step(self, lr: float, gradient_scale: float) -> None:
        """Update the shards with gradients times `gradient_scale`, and mark the parameters to be gathered.

        The update may overwrite the gradients.
        Communication: none for AdamW and SGD; for LAMB one small all-reduce along each axis of the stage (lamb.py); for
        Muon all-to-alls over the replicas and the axis that cuts a weight (muon.py).
        """
        self.num_updates += 1
        by_rule: dict[str, list[tuple[ShardState, Tensor]]] = {}
        for chunk, state in self.states:
            by_rule.setdefault(state.rule.name, []).append((state, chunk.gradient_shard(state.bucket)))
        for name, found in by_rule.items():
            self._update(name, [state for state, _ in found], [gradient for _, gradient in found], lr, gradient_scale)
        for _, state in self.states:
            state.average_(self.config.ema_decay)
        self._mark_changed()

    def _update(
        self, rule: str, states: Sequence[ShardState], gradients: Sequence[Tensor], lr: float, gradient_scale: float
    ) -> None:
        """Update the shards of one rule."""
        if self._lamb is not None and rule == "lamb":
            self._lamb.update_(gradients, lr, self.num_updates, gradient_scale)
        elif self._muon is not None and rule == "muon":
            self._muon.update_(gradients, lr, gradient_scale)
        else:
            for state, gradient in zip(states, gradients, strict=True):
                if rule == "sgd":
                    sgd_update_(state, gradient, self.config, lr, gradient_scale)
                else:
                    adamw_update_(state, gradient, self.config, lr, self.num_updates, gradient_scale)

    def begin_averages(self) -> None:
        """Set the moving averages of the weights, if there are any, to the weights."""
        for _, state in self.states:
            state.average_(0.0)

    def copy_to_parameters(self) -> None:
        """Round the master weights into the parameters, and mark the parameters to be gathered."""
        for _, state in self.states:
            state.copy_to_parameters()
        self._mark_changed()

    def _mark_changed(self) -> None:
        for chunk in self._chunks:
            chunk.mark_shards_changed()

    def flat_shards(self) -> Iterator[tuple[str, FlatShard, bool]]:
        """Yield (kind of state, shard, whether this rank is its first holder) for all state of this rank."""
        for _, state in self.states:
            for kind, shard in state.flat_shards():
                yield kind, shard, shard.holders.index == 0


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
