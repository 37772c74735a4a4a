"""The optimizer state of one bucket's shard: master weights and two moments."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatrain.ops.precision import accumulate_dtype
from megatrain.parallel.bucket import Bucket
from megatrain.parallel.sharding import FlatShard


class ShardState:
    """Flat state of one shard, in fp32 (fp64 for fp64 parameters).

    Where the parameters have the master weights' dtype, `master` IS this rank's shard of the parameters, not a copy.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        values = bucket.values[bucket.shard]
        self.master = values.to(accumulate_dtype(values.dtype))
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        shard, boxes = bucket.shard, list(bucket.boxes())
        used = bucket.starts[-1] + bucket.parameters[-1].parameter.numel()
        starts = [*(start for _, _, start in boxes), used]
        borders = [min(max(border, shard.start), shard.stop) - shard.start for border in starts]
        device = self.master.device
        self.run_borders = torch.tensor(borders, dtype=torch.int64, device=device)
        """The bucket's box i lies at [run_borders[i], run_borders[i + 1]) of this shard; empty if it is elsewhere."""
        self.is_decayed = torch.tensor([logical.is_decayed for logical, _, _ in boxes], device=device)
        """For each box, whether weight decay applies."""

    @property
    def has_own_master(self) -> bool:
        return self.master.dtype != self.bucket.values.dtype

    @property
    def published(self) -> Tensor | None:
        """This rank's shard of the parameters, or None where `master` is that shard itself."""
        return self.bucket.values[self.bucket.shard] if self.has_own_master else None

    def copy_to_parameters(self) -> None:
        """Round the master weights into this rank's shard of the parameters. An update does that itself."""
        if self.published is not None:
            self.published.copy_(self.master)

    def tensors(self) -> dict[str, Tensor]:
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def flat_shards(self) -> Iterator[tuple[str, FlatShard]]:
        """Yield (kind of state, box of a logical parameter) for all that this shard holds."""
        for kind, flat in self.tensors().items():
            for shard in self.bucket.flat_shards(flat):
                yield kind, shard
