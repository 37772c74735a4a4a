"""A flat bucket: the parameters of one chunk that are reduced and gathered together, and this rank's shard of them.

Parameters lie one after another in backward order, and the end is padded. So all replicas' shards have the same size, a
multiple of 128 elements (NCCL is slow on odd sizes), and a shard may begin within a parameter. Each parameter becomes a
view of its bucket. Source: Megatron-LM's distributed optimizer; ZeRO (arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from megatrain.comm.group import Group
from megatrain.contracts.errors import TopologyError
from megatrain.parallel.boxes import boxes_of_range
from megatrain.parallel.placement import SOLE_HOLDER, Placement, ShardHolders
from megatrain.parallel.sharding import FlatShard, LogicalParameter

SHARD_MULTIPLE = 128


@dataclass(frozen=True, slots=True, eq=False)
class ShardSegment:
    """The part of one box of a parameter that lies in this rank's shard: shard[start:stop]."""

    logical: LogicalParameter
    placement: Placement
    start: int
    stop: int
    box_start: int
    """Where the segment begins in the flattened box."""


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """A part of this rank's shard, shard[start:stop], with the same holders for all values."""

    start: int
    stop: int
    holders: ShardHolders


class Bucket:
    """Flat memory for parameters and gradients, in the order given.

    All parameters of a bucket have the same groups and the same update rule. Gradients are reduce-scattered, and
    parameters all-gathered, over `replicas`. After the reduce-scatter, the slices of a shard that have several holders
    are summed over `sum_groups`, one after the other; these are empty if no shard has several holders.
    """

    def __init__(
        self,
        parameters: Sequence[LogicalParameter],
        groups: Mapping[str, Group],
        *,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """groups: the rank's groups, by name. Raises: TopologyError when one that the placements name is missing."""
        self.parameters = tuple(parameters)
        replica_group, sum_groups = self.parameters[0].groups
        for name in (replica_group, *sum_groups):
            if name not in groups:
                raise TopologyError(
                    f"the gradient of {self.parameters[0].name} is summed over the group {name}, and this layout has "
                    f"only {', '.join(groups)}: a group exists along each axis that the layout lists (Layout.axes); "
                    "list the axis there, or change the parameter's row (parallel/decoder.py)"
                )
        self.replicas = groups[replica_group]
        self.sum_groups = tuple(groups[name] for name in sum_groups)
        self.rule = self.parameters[0].rule
        self.gradient_dtype = gradient_dtype
        numels = [logical.parameter.numel() for logical in self.parameters]
        self.starts = list(accumulate(numels, initial=0))[:-1]
        multiple = SHARD_MULTIPLE * self.replicas.size
        self.numel = -(-sum(numels) // multiple) * multiple
        self.shard_numel = self.numel // self.replicas.size
        self.values = torch.zeros(self.numel, dtype=dtype, device=device)
        self.gradients: Tensor | None = None
        self._is_written = [False] * len(self.parameters)
        for logical, start in zip(self.parameters, self.starts, strict=True):
            # the module keeps its parameter object; on the meta device it had no memory, now it uses that of the bucket
            torch.utils.swap_tensors(logical.parameter, nn.Parameter(self._view(self.values, logical, start)))

    @property
    def shard(self) -> slice:
        """The slice of the bucket that is this rank's shard."""
        return slice(self.replicas.rank * self.shard_numel, (self.replicas.rank + 1) * self.shard_numel)

    def allocate_gradients(self) -> None:
        """Allocate memory for the whole bucket's gradients. A gradient that is never written counts as zero."""
        self.gradients = torch.empty(self.numel, dtype=self.gradient_dtype, device=self.values.device)
        used = self.starts[-1] + self.parameters[-1].parameter.numel()
        self.gradients[used:].zero_()  # padding: never written again
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Discard the gradients. The next ones are copied, not added, which saves a pass over memory."""
        self._is_written = [False] * len(self.parameters)

    @property
    def written(self) -> tuple[bool, ...]:
        """Which parameters have a gradient since the last clear_gradients, in order."""
        return tuple(self._is_written)

    @written.setter
    def written(self, written: tuple[bool, ...]) -> None:
        self._is_written = list(written)

    def take_gradient(self, index: int) -> tuple[Tensor, bool]:
        """Return the memory of parameter number `index`'s gradient, and whether it is fresh: see Addition."""
        if self.gradients is None:  # ZeRO-2: a tied head, in the last chunk of the stage, is written first
            self.allocate_gradients()
        assert self.gradients is not None
        is_fresh = not self._is_written[index]
        self._is_written[index] = True
        return self._view(self.gradients, self.parameters[index], self.starts[index]), is_fresh

    def finished_gradients(self) -> Tensor:
        """Return the whole bucket's gradients. A parameter that got no gradient has zeros."""
        assert self.gradients is not None
        for logical, start, is_written in zip(self.parameters, self.starts, self._is_written, strict=True):
            if not is_written:
                self._view(self.gradients, logical, start).zero_()
        return self.gradients

    def boxes(self) -> Iterator[tuple[LogicalParameter, Placement, int]]:
        """Yield the parameters' boxes in the order of the bucket, each with its start in the bucket."""
        for logical, start in zip(self.parameters, self.starts, strict=True):
            for placement in logical.placements:
                yield logical, placement, start
                start += placement.box.numel

    def segments(self) -> Iterator[ShardSegment]:
        """Yield the parts of the parameters' boxes that lie in this rank's shard, in order, without the padding."""
        shard = self.shard
        for logical, placement, start in self.boxes():
            first = max(start, shard.start)
            last = min(start + placement.box.numel, shard.stop)
            if first < last:
                yield ShardSegment(logical, placement, first - shard.start, last - shard.start, first - start)

    def shard_slices(self) -> list[ShardSlice]:
        """Return the slices of this rank's shard in order.

        If all boxes have the same holders, it is a single slice, with the padding.
        """
        kinds = {placement.holders for _, placement, _ in self.boxes()}
        if len(kinds) == 1:
            return [ShardSlice(0, self.shard_numel, *kinds)]
        found = [ShardSlice(segment.start, segment.stop, segment.placement.holders) for segment in self.segments()]
        used = found[-1].stop if found else 0
        return [*found, ShardSlice(used, self.shard_numel, SOLE_HOLDER)] if used < self.shard_numel else found

    def flat_shards(self, flat: Tensor) -> Iterator[FlatShard]:
        """Yield `flat`, memory in the form of this rank's shard, as boxes of the logical parameters.

        Shapes: flat [shard_numel]; each yielded tensor is a view of it.
        """
        for segment in self.segments():
            placement, stop = segment.placement, segment.box_start + segment.stop - segment.start
            for position, box in boxes_of_range(placement.box.sizes, segment.box_start, stop):
                first = segment.start + position - segment.box_start
                view = flat[first : first + box.numel].view(box.sizes)
                within = box.shifted(placement.box.offsets)
                yield FlatShard(placement.name, placement.global_shape, within, view, placement.holders)

    @staticmethod
    def _view(flat: Tensor, logical: LogicalParameter, start: int) -> Tensor:
        parameter = logical.parameter
        return flat[start : start + parameter.numel()].view(parameter.shape)


def group_into_buckets(parameters: Sequence[LogicalParameter], bucket_size: int) -> list[list[LogicalParameter]]:
    """Assign a chunk's parameters, given in forward order, to buckets in backward order.

    The parameters of a bucket have the same groups over which gradients are summed, and the same update rule. A bucket
    is closed when it holds `bucket_size` elements or more.
    """
    open_buckets: dict[Hashable, list[LogicalParameter]] = {}
    closed: list[list[LogicalParameter]] = []
    for logical in reversed(parameters):
        key = logical.bucket_key
        bucket = open_buckets.setdefault(key, [])
        bucket.append(logical)
        if sum(logical.parameter.numel() for logical in bucket) >= bucket_size:
            closed.append(open_buckets.pop(key))
    return closed + list(open_buckets.values())
