"""The optimizer state of one bucket's shard: master weights, and the other state that its update rule needs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from megatrain.checkpoint_format.stored_tensors import EMA, MASTER
from megatrain.ops.precision import accumulate_dtype
from megatrain.parallel.bucket import Bucket
from megatrain.parallel.sharding import FlatShard


class ShardState:
    """Flat state of one shard, in fp32 (fp64 for fp64 parameters).

    If the parameters have the master weights' dtype, `master` IS this rank's shard of the parameters, not a copy.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.rule = bucket.rule
        values = bucket.values[bucket.shard]
        self.master = values.to(accumulate_dtype(values.dtype))
        self._kept = {kind: torch.zeros_like(self.master) for kind in self.rule.state_kinds}
        shard, boxes = bucket.shard, list(bucket.boxes())
        used = bucket.starts[-1] + bucket.parameters[-1].parameter.numel()
        starts = [*(start for _, _, start in boxes), used]
        borders = [min(max(border, shard.start), shard.stop) - shard.start for border in starts]
        device = self.master.device
        self.run_borders = torch.tensor(borders, dtype=torch.int64, device=device)
        """The bucket's box i is [run_borders[i], run_borders[i + 1]) of this shard; empty without a part here."""
        is_decayed = [logical.is_decayed for logical, _, _ in boxes]
        self.is_decayed = torch.tensor(is_decayed, device=device)
        """For each box, whether weight decay applies."""
        runs = [slice(*ends) for ends in pairwise(borders)]
        self._decayed = [run for run, decays in zip(runs, is_decayed, strict=True) if decays and run.start < run.stop]

    @property
    def has_own_master(self) -> bool:
        return self.master.dtype != self.bucket.values.dtype

    @property
    def published(self) -> Tensor | None:
        """This rank's shard of the parameters, or None if `master` is that shard itself."""
        return self.bucket.values[self.bucket.shard] if self.has_own_master else None

    def of(self, kind: str) -> Tensor:
        """Return the state of one of the rule's kinds. Shapes: [shard_numel]."""
        return self._kept[kind]

    def copy_to_parameters(self) -> None:
        """Round the master weights into this rank's shard of the parameters. Updates do that themselves."""
        if self.published is not None:
            self.published.copy_(self.master)

    def move_(self, direction: Tensor, lr: float) -> None:
        """Decay the weights, move them by -lr * direction, and round them into the parameters.

        lr: the learning rate of the optimizer, which is multiplied by the rule's lr_scale.
        Shapes: direction [shard_numel], 0 in the padding.
        """
        lr *= self.rule.lr_scale
        for run in self._decayed if self.rule.weight_decay else ():
            self.master[run].mul_(1.0 - lr * self.rule.weight_decay)
        self.master.add_(direction, alpha=-lr)
        self.copy_to_parameters()

    def average_(self, decay: float) -> None:
        """Update the moving average of the weights, if the rule keeps one. decay: 0 copies the weights."""
        if self.rule.has_ema:
            self.of(EMA).lerp_(self.master, 1.0 - decay)

    def tensors(self) -> dict[str, Tensor]:
        return {MASTER: self.master, **self._kept}

    def flat_shards(self) -> Iterator[tuple[str, FlatShard]]:
        """Yield (kind of state, box of a logical parameter) for every box in this shard."""
        for kind, flat in self.tensors().items():
            for shard in self.bucket.flat_shards(flat):
                yield kind, shard
