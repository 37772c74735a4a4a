"""Sums the parts of a gradient shard over the ranks that hold the same part: its shard holders.

For a norm of the residual stream these are the tp ranks, for a tied embedding ranks of the first and the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.comm.exchange import Pending
from megatrain.comm.group import Group
from megatrain.contracts.black_box.operations import all_reduce_along
from megatrain.parallel.bucket import Bucket


@dataclass(frozen=True, slots=True, eq=False)
class SumOverHolders:
    """Parts of a shard, one after another in `flat`, that are summed over several groups in turn.

    If there is one part, `flat` is that part, not a copy. `pending`: the sum over the first group. others: the groups
    after it.
    """

    parts: Sequence[Tensor]
    flat: Tensor
    pending: Pending
    others: Sequence[Group]

    def finish(self) -> None:
        """Wait for the sums, and write them to the shard. Communication: an all-reduce over each of `others`."""
        self.pending.wait()
        for group in self.others:
            _sum_over(group, self.flat).wait()
        if len(self.parts) > 1:
            for part, summed in zip(self.parts, self.flat.split([part.numel() for part in self.parts]), strict=True):
                part.copy_(summed)


def start_sum_over_holders(bucket: Bucket, shard: Tensor) -> SumOverHolders | None:
    """Start to sum the parts of this rank's `shard` of a bucket that have several holders. Returns None if none have.

    Communication: one all-reduce over the first of the bucket's sum groups, or none, the same on all ranks of the
    groups.
    """
    parts = [
        shard[shard_slice.start : shard_slice.stop]
        for shard_slice in bucket.shard_slices()
        if shard_slice.holders.groups
    ]
    if not parts:
        return None
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    first, *others = bucket.sum_groups
    return SumOverHolders(parts, flat, _sum_over(first, flat), others)


def _sum_over(group: Group, flat: Tensor) -> Pending:
    return group.all_reduce(flat, all_reduce_along(group.name))
