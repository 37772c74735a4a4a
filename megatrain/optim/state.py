"""What the optimizer keeps of one bucket's share: master weights and two moments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.ops.precision import accumulate_dtype
from megatrain.parallel.bucket import Bucket
from megatrain.parallel.sharding import FlatShard


@dataclass(frozen=True, slots=True)
class ParameterRun:
    """Where one parameter lies in the share."""

    run: slice
    is_decayed: bool


class ShareState:
    """Flat state of one share, in fp32 (fp64 for fp64 parameters).

    Where the parameters have the master weights' dtype, `master` IS this rank's share of them: no second copy.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        values = bucket.values[bucket.share]
        self.master = values.to(accumulate_dtype(values.dtype))
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        present = {
            segment.logical.name: ParameterRun(slice(segment.start, segment.stop), segment.logical.is_decayed)
            for segment in bucket.segments()
        }
        self.parameter_runs = [present.get(logical.name) for logical in bucket.parameters]
        """One entry for each parameter of the bucket, None where this share holds nothing of it."""
        self.decayed_runs = _joined(run.run for run in present.values() if run.is_decayed)

    @property
    def has_own_master(self) -> bool:
        return self.master.data_ptr() != self.bucket.values[self.bucket.share].data_ptr()

    def publish(self) -> None:
        """Round the master weights into this rank's share of the parameters."""
        if self.has_own_master:
            self.bucket.values[self.bucket.share].copy_(self.master)

    def tensors(self) -> dict[str, Tensor]:
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def flat_shards(self) -> Iterator[tuple[str, FlatShard]]:
        """Yield (kind of state, box of a logical parameter) for all that this share holds."""
        for kind, flat in self.tensors().items():
            for shard in self.bucket.flat_shards(flat):
                yield kind, shard


def _joined(runs: Iterator[slice]) -> list[slice]:
    """Join neighbouring runs, so that one call serves them."""
    joined: list[slice] = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            joined[-1] = slice(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return joined
