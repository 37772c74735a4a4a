"""Data parallel by chunk with sharded gradients: accumulate, reduce-scatter, and gather the updated parameters.

ZeRO-1 accumulates full gradients over the micro-batches and reduce-scatters a chunk at the reduce action of the
schedule, after its last backward. ZeRO-2 reduce-scatters after every backward and keeps the sum of this rank's shard
only. With overlap by bucket, the reduction of a bucket whose gradients are all ready starts during that backward, in
one fixed order of the buckets (write_counts.py), and each part of the model waits only for its own parameters. With
overlap off, each collective is awaited at once. The collectives and their order stay the same, so the results are
bitwise the same.
Source: MegaScale sec. 3.2; ZeRO (arXiv:1910.02054).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatrain.comm.exchange import Pending
from megatrain.comm.group import Group
from megatrain.contracts.black_box.operations import Operation
from megatrain.ops.main_grad import Addition
from megatrain.parallel.bucket import Bucket, group_into_buckets
from megatrain.parallel.bucket_main_grad import BucketMainGrad, add_gradients_to
from megatrain.parallel.deferred_wgrads import Wgrads
from megatrain.parallel.holder_sums import start_sum_over_holders
from megatrain.parallel.sharding import LogicalParameter
from megatrain.parallel.write_counts import WriteCounts

WrittenGradients = tuple[tuple[bool, ...], ...]
"""For each bucket and each parameter in it: whether the sum of its gradients over the micro-batches has begun."""


@dataclass(frozen=True, slots=True)
class DataParallelOptions:
    """How one chunk exchanges gradients and parameters.

    zero_stage: 1 or 2. reduce_dtype: the dtype in which gradients are sent. bucket_size: in elements.
    """

    zero_stage: int
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    reduce_dtype: torch.dtype
    bucket_size: int
    has_overlap: bool


class ChunkDataParallel:
    """The buckets of one chunk and their collectives in flight."""

    def __init__(
        self,
        parameters: Sequence[LogicalParameter],
        groups: Mapping[str, Group],
        options: DataParallelOptions,
        device: torch.device,
        number: int = 0,
    ) -> None:
        """groups: the rank's groups by name. number: the chunk's number on its stage, for the recorded spans."""
        self.options = options
        self.number = number
        self.wgrads = Wgrads()
        self.buckets: list[Bucket] = []
        self._reductions: deque[tuple[Bucket, Pending]] = deque()
        """The reductions of gradients into this rank's shards, in flight."""
        self._gathers: dict[Bucket, Pending] = {}
        self._shards: dict[Bucket, Tensor] = {}
        self._is_stale = False
        for members in group_into_buckets(parameters, options.bucket_size):
            bucket = Bucket(members, groups, dtype=options.dtype, gradient_dtype=options.gradient_dtype, device=device)
            self.buckets.append(bucket)
            for index, logical in enumerate(members):
                write = partial(self._add_gradient, len(self.buckets) - 1, index)
                add_gradients_to(BucketMainGrad(write, self.wgrads), logical.parameter)
            if options.zero_stage == 2:
                # the sum over micro-batches; full gradients exist only during a backward and its reduction
                self._shards[bucket] = torch.zeros(bucket.shard_numel, dtype=options.gradient_dtype, device=device)
            else:
                bucket.allocate_gradients()
        self._counts = WriteCounts([bucket.parameters for bucket in self.buckets])
        self._num_started = 0
        """How many reductions, in the fixed order, have started in the current window of micro-batches."""
        self._is_by_bucket = self._is_counting = False

    def overlap_by_bucket(self, module: nn.Module) -> None:
        """Overlap collectives with the computation of the chunk itself, not only with that of other chunks.

        `module` is the chunk's module. Each part of it waits for its own parameters before its forward, and each bucket
        is reduced as soon as it is complete.
        Raises: ValueError for a parameter outside of all parts, because no part would wait for its gather.
        """
        self._is_by_bucket = True
        bucket_of = {logical.parameter: bucket for bucket in self.buckets for logical in bucket.parameters}
        for part in _parts(module):
            # a parameter of another chunk (a tied head) was awaited by a part of that chunk, which ran earlier
            own = dict.fromkeys(bucket_of.get(parameter) for parameter in part.parameters())
            buckets = [bucket for bucket in own if bucket is not None]
            part.register_forward_pre_hook(partial(self._await_gathers, buckets))
        known = {parameter for part in _parts(module) for parameter in part.parameters()}
        for name, parameter in module.named_parameters():
            if parameter not in known:
                raise ValueError(f"no part of the chunk waits for {name} to be gathered")

    def set_num_microbatches(self, num_microbatches: int) -> None:
        """Set how many micro-batches one reduction sums (ZeRO-1); it may start early, in the last one's backward."""
        if self.options.zero_stage == 1:
            self._begin_window(num_microbatches)

    def start_step(self) -> None:
        """Discard the gradients of the last step."""
        for bucket in self.buckets:
            if self.options.zero_stage == 2:
                self._shards[bucket].zero_()
            else:
                bucket.clear_gradients()

    def written_gradients(self) -> WrittenGradients:
        """Return which sums of gradients have begun: the next gradient is added to these and overwrites the others."""
        return tuple(bucket.written for bucket in self.buckets)

    def set_written_gradients(self, written: WrittenGradients) -> None:
        """Set which sums of gradients have begun, after a replayed backward.

        A replay writes to the buckets without calling their main_grads.
        """
        for bucket, gradients in zip(self.buckets, written, strict=True):
            bucket.written = gradients

    def finish_earlier_reductions(self) -> None:
        """Finish the reductions that an earlier micro-batch started (ZeRO-2). This frees its full gradients."""
        if self.options.zero_stage == 2:
            self.finish_reductions()

    def before_backward(self) -> None:
        """Allocate one micro-batch's gradients (ZeRO-2 keeps none between micro-batches).

        Every chunk of the stage must have called finish_earlier_reductions before, so that full gradients exist for
        only one chunk at a time.
        """
        if self.options.zero_stage == 2:
            for bucket in self.buckets:
                # a tied head is in the stage's last chunk, and its gradient is there already
                if bucket.gradients is None:
                    bucket.allocate_gradients()
            self._begin_window(1)  # each micro-batch has its own reduction

    def after_backward(self) -> None:
        """Start the reduction of one micro-batch's gradients (ZeRO-2)."""
        if self.options.zero_stage == 2:
            self._start_reductions()

    def reduce(self) -> None:
        """Start the reductions that have not started early, after the chunk's last backward (ZeRO-1)."""
        if self.options.zero_stage == 1:
            self._start_reductions()

    def finish_reduce(self) -> None:
        """Wait until this rank's shard of every gradient is summed over all groups of its bucket.

        Raises: RuntimeError when a gradient was written after the last reduction of its bucket (ZeRO-2).
        """
        self.finish_reductions()
        for bucket in self.buckets:
            # a reduction releases the memory of the gradients, so only a later write can have allocated it again
            if self.options.zero_stage == 2 and bucket.gradients is not None:
                names = [
                    parameter.name
                    for parameter, is_written in zip(bucket.parameters, bucket.written, strict=True)
                    if is_written
                ]
                raise RuntimeError(
                    f"the gradients of {', '.join(names)} were written after the last reduction of the step: a "
                    "backward ran outside of the schedule, or a module of another chunk uses them"
                )
        # a parameter that no forward used may still be in a gather, and the optimizer writes to it next
        self.finish_gather()
        sums = []
        for bucket in self.buckets:
            started = start_sum_over_holders(bucket, self.gradient_shard(bucket))
            if started is None:
                continue
            if self.options.has_overlap:
                sums.append(started)
            else:
                started.finish()
        for started in sums:
            started.finish()

    def gradient_shard(self, bucket: Bucket) -> Tensor:
        """Return this rank's shard of the summed gradients. Shapes: [shard_numel]."""
        if self.options.zero_stage == 2:
            return self._shards[bucket]
        assert bucket.gradients is not None
        return bucket.gradients[bucket.shard]

    def mark_shards_changed(self) -> None:
        """Record that the shards of the parameters were updated: they must be gathered before the next forward."""
        self._is_stale = True

    def start_gather(self) -> None:
        """Start to all-gather the updated shards of the parameters, if none was started since the update."""
        if not self._is_stale:
            return
        self._is_stale = False
        # the buckets are in the order of the backward, and the forward needs the last one first
        for bucket in reversed(self.buckets):
            shard, whole = bucket.values[bucket.shard], bucket.values
            pending = bucket.replicas.all_gather(shard, Operation.PARAMS_ALL_GATHER, out=whole, chunk=self.number)
            if not self.options.has_overlap:
                pending.wait()
            self._gathers[bucket] = pending

    def await_parameters(self) -> None:
        """Wait until the forward may begin. With overlap by bucket, each part of the model waits instead.

        Raises: RuntimeError when the parameters were updated and no gather has been started since.
        """
        if self._is_stale:
            raise RuntimeError(
                f"the parameters of chunk {self.number} were updated and not gathered since: the schedule has no "
                "GATHER before this forward"
            )
        if not self._is_by_bucket:
            self.finish_gather()

    def finish_gather(self) -> None:
        """Wait for the gathers in flight."""
        self._await_gathers(list(self._gathers))

    def _add_gradient(self, number: int, index: int, add: Addition) -> None:
        """Call `add` with the gradient of parameter `index` of bucket `number`, and start to reduce complete buckets.

        Raises: RuntimeError for more writes than declared.
        """
        if self._is_counting:
            self._counts.count(number, index)  # before the write: the reduction of the bucket may be in flight
        add(*self.buckets[number].take_gradient(index))
        if not self._is_counting:
            return
        order = self._counts.order
        # a complete bucket waits for the earlier ones, because all ranks must start collectives in the same order
        while self._num_started < self._counts.num_early and self._counts.is_complete(order[self._num_started]):
            self._start_reduction(self.buckets[order[self._num_started]])
            self._num_started += 1

    def _begin_window(self, num_microbatches: int) -> None:
        self._is_counting = self._is_by_bucket
        self._counts.begin(num_microbatches)

    def _await_gathers(self, buckets: Sequence[Bucket], *_: object) -> None:
        for bucket in buckets:
            pending = self._gathers.pop(bucket, None)
            if pending is not None:
                pending.wait()

    def _start_reductions(self) -> None:
        for number in self._counts.order[self._num_started :]:
            self._start_reduction(self.buckets[number])
        self._num_started, self._is_counting = 0, False
        if not self.options.has_overlap:
            self.finish_reductions()

    def _start_reduction(self, bucket: Bucket) -> None:
        options = self.options
        gradients = bucket.finished_gradients()
        shard = gradients[bucket.shard]
        if options.zero_stage == 2 and options.reduce_dtype != gradients.dtype and bucket.replicas.size > 1:
            shard = torch.empty_like(shard)  # a slice would keep all gradients alive, although a cast copy is sent
        # with one replica nothing is sent, so the gradients are not rounded
        whole = gradients.to(options.reduce_dtype) if bucket.replicas.size > 1 else gradients
        pending = bucket.replicas.reduce_scatter(
            whole, Operation.GRADS_REDUCE_SCATTER, out=shard, chunk=self.number, sums_in_fp32=True
        )
        self._reductions.append((bucket, pending))
        if options.zero_stage == 2:
            bucket.gradients = None  # the reduction in flight keeps the memory alive

    def finish_reductions(self) -> None:
        """Wait for the reductions in flight."""
        while self._reductions:
            bucket, pending = self._reductions.popleft()  # drops the last one, with its full gradients, before the wait
            result = pending.wait()
            if self.options.zero_stage == 2:
                self._shards[bucket].add_(result)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest submodules that are called: the children of a module, and the entries of containers."""
    for child in module.children():
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            yield from _parts(child)
        else:
            yield child
