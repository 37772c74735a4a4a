"""The sharded optimizer: each rank updates its share of every bucket in full precision.

A step is: the gradients' squared norm (this rank's part), the clipping factor once all ranks know the whole, the update
of the shares, and the parameters rounded and ready to be gathered. Source: ZeRO (arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatrain.comm.mesh import Mesh
from megatrain.config.optimizer import OptimizerConfig
from megatrain.ops.square_sums import square_sum
from megatrain.optim.adamw import adamw_update_
from megatrain.optim.lamb import lamb_updates_
from megatrain.optim.state import ShareState
from megatrain.parallel.data_parallel import ChunkDataParallel
from megatrain.parallel.sharding import FlatShard


class ShardedOptimizer:
    """State and update of all shares of this rank. `num_updates` counts the updates done: skipped steps are none."""

    def __init__(self, chunks: Sequence[ChunkDataParallel], config: OptimizerConfig, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.num_updates = 0
        self._chunks = tuple(chunks)
        self.states = [(chunk, ShareState(bucket)) for chunk in chunks for bucket in chunk.buckets]

    def gradient_square_sum(self) -> Tensor:
        """Return this rank's part of the squared gradient norm, fp64; the first of its copies counts an element."""
        parts = []
        for chunk, state in self.states:
            share = chunk.gradient_share(state.bucket)
            for stretch in state.bucket.stretches():
                part = square_sum(share[stretch.start : stretch.stop])
                # times 0 keeps a non-finite value visible on every rank that has it
                parts.append(part if stretch.copies.index == 0 else part * 0.0)
        return torch.stack(parts).sum()

    def step(self, lr: float, gradient_scale: float) -> None:
        """Update the shares with gradients times `gradient_scale`, and leave the parameters ready to be gathered.

        The gradients are used up.
        Communication: none for AdamW; for LAMB one small all-reduce over dp and tp.
        """
        self.num_updates += 1
        gradients = [chunk.gradient_share(state.bucket) for chunk, state in self.states]
        states = [state for _, state in self.states]
        if self.config.name == "lamb":
            lamb_updates_(states, gradients, self.config, self.mesh, lr, self.num_updates, gradient_scale)
        else:
            for state, gradient in zip(states, gradients, strict=True):
                adamw_update_(state, gradient, self.config, lr, self.num_updates, gradient_scale)
        self._say_changed()

    def publish(self) -> None:
        """Round master weights that were loaded into the parameters; they are gathered before their next use."""
        for _, state in self.states:
            state.publish()
        self._say_changed()

    def _say_changed(self) -> None:
        for chunk in self._chunks:
            chunk.shares_changed()

    def flat_shards(self) -> Iterator[tuple[str, FlatShard, bool]]:
        """Yield (kind of state, shard, whether this rank is the one that saves it) for all state of this rank."""
        for _, state in self.states:
            for kind, shard in state.flat_shards():
                yield kind, shard, shard.copies.index == 0
