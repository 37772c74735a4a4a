"""Data parallel by chunk with sharded gradients: accumulate, reduce-scatter, and gather the updated parameters.

ZeRO-1 accumulates whole gradients over the micro-batches and reduce-scatters a chunk when the schedule says so, after
its last backward. ZeRO-2 reduce-scatters after every backward and keeps the sum of this rank's share only. Buckets that
are whole before start in that backward, in their order (early_start.py), and a part of the model waits only for its own
parameters. With overlap off each exchange is awaited at once: the same exchanges in the same order, and so bitwise the
same numbers. Source: MegaScale sec. 3.2; ZeRO (arXiv:1910.02054).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatrain.comm.group import Group
from megatrain.comm.queue import Pending
from megatrain.contracts.operations import Operation, all_reduce_along
from megatrain.ops.gradient_sink import Addition, set_gradient_sink
from megatrain.parallel.bucket import Bucket, group_into_buckets
from megatrain.parallel.early_start import WriteCounts
from megatrain.parallel.sharding import LogicalParameter
from megatrain.parallel.weight_products import WeightProducts

_logger = logging.getLogger(__name__)

WrittenGradients = tuple[tuple[bool, ...], ...]
"""Of each bucket and each of its parameters, whether its gradient has begun its sum over the step's micro-batches."""


@dataclass(frozen=True, slots=True)
class DataParallelOptions:
    """zero_stage 1 or 2; reduce_dtype is what travels; bucket_size in elements."""

    zero_stage: int
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    reduce_dtype: torch.dtype
    bucket_size: int
    has_overlap: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Reduction:
    """One bucket's gradients on their way to this rank's share."""

    bucket: Bucket
    pending: Pending


class ChunkDataParallel:
    """The buckets of one chunk and what is in flight for them."""

    def __init__(
        self,
        parameters: Sequence[LogicalParameter],
        groups: Mapping[str, Group],
        options: DataParallelOptions,
        device: torch.device,
        number: int = 0,
    ) -> None:
        """groups: the rank's, by name. number: of the chunk on its stage, for the records."""
        self.options = options
        self.number = number
        self.weight_products = WeightProducts()
        self.buckets: list[Bucket] = []
        self._reductions: list[_Reduction] = []
        self._gathers: dict[Bucket, Pending] = {}
        self._shares: dict[Bucket, Tensor] = {}
        self._is_stale = False
        for members in group_into_buckets(parameters, options.bucket_size):
            bucket = Bucket(members, groups, dtype=options.dtype, gradient_dtype=options.gradient_dtype, device=device)
            self.buckets.append(bucket)
            for index, logical in enumerate(members):
                sink = _BucketSink(self, len(self.buckets) - 1, index)
                set_gradient_sink(logical.parameter, sink)
                # for what comes from operations that know nothing of sinks
                logical.parameter.register_post_accumulate_grad_hook(_weakly(sink))
            if options.zero_stage == 2:
                self._shares[bucket] = torch.zeros(bucket.share_numel, dtype=options.gradient_dtype, device=device)
            else:
                bucket.allocate_gradients()
        self._counts = WriteCounts([len(bucket.parameters) for bucket in self.buckets])
        self._num_started = 0
        """Buckets whose reduction has started, in the window that they are reduced after."""
        self._is_by_bucket = self._is_counting = False

    def overlap_by_bucket(self, module: nn.Module) -> None:
        """Let exchanges overlap with the computes of the chunk itself, not only with those of other chunks.

        Each part of `module`, the chunk's, waits for its own parameters before its forward, and buckets are reduced as
        soon as they are whole. Raises: ValueError for a parameter that is in no part: nobody would wait for it.
        """
        self._is_by_bucket = True
        bucket_of = {logical.parameter: bucket for bucket in self.buckets for logical in bucket.parameters}
        for part in _parts(module):
            # a parameter of another chunk (a tied head) was awaited by that chunk's part, which runs before
            own = dict.fromkeys(bucket_of.get(parameter) for parameter in part.parameters())
            buckets = [bucket for bucket in own if bucket is not None]
            part.register_forward_pre_hook(partial(self._await_gathers, buckets))
        known = {parameter for part in _parts(module) for parameter in part.parameters()}
        for name, parameter in module.named_parameters():
            if parameter not in known:
                raise ValueError(f"no part of the chunk waits for {name} to be gathered")

    def expect(self, num_microbatches: int) -> None:
        """Say how many micro-batches there are to a reduction (ZeRO-1): buckets may start early in the last one."""
        if self.options.zero_stage == 1:
            self._begin_window(num_microbatches)

    def start_step(self) -> None:
        """Forget the gradients of the last step."""
        for bucket in self.buckets:
            if self.options.zero_stage == 2:
                self._shares[bucket].zero_()
            else:
                bucket.clear_gradients()

    def written_gradients(self) -> WrittenGradients:
        """Return which gradients the next one of the same parameter is added to; it overwrites the others."""
        return tuple(bucket.written for bucket in self.buckets)

    def set_written_gradients(self, written: WrittenGradients) -> None:
        """Say so for a backward that wrote to the buckets without asking for its sinks: one that was replayed."""
        for bucket, one in zip(self.buckets, written, strict=True):
            bucket.written = one

    def settle(self) -> None:
        """Finish what an earlier micro-batch sent on its way (ZeRO-2), which frees its whole gradients."""
        if self.options.zero_stage == 2:
            self.finish_transfers()

    def before_backward(self) -> None:
        """Make room for one micro-batch's gradients (ZeRO-2 keeps none between micro-batches).

        Every chunk of the stage must have settled: then whole gradients of one chunk exist at a time.
        """
        if self.options.zero_stage == 2:
            for bucket in self.buckets:
                bucket.allocate_gradients()
            self._begin_window(1)

    def after_backward(self) -> None:
        """Send one micro-batch's gradients on their way (ZeRO-2)."""
        if self.options.zero_stage == 2:
            self._start_transfers()

    def reduce(self) -> None:
        """Start what has not started early of the gradients' reduction, after the chunk's last backward."""
        if self.options.zero_stage == 1:
            self._start_transfers()

    def finish_reduce(self) -> None:
        """Wait until this rank's share of every gradient is summed over both groups of its bucket."""
        self.finish_transfers()
        self.finish_gather()  # of what no forward used: the optimizer is about to write there
        sums = []
        for bucket in self.buckets:
            sums += _start_sum(bucket, self.gradient_share(bucket))
            if not self.options.has_overlap and sums:
                sums.pop().finish()
        for one in sums:
            one.finish()

    @property
    def has_late_gradients(self) -> bool:
        """Whether a gradient was written here when its bucket was on its way: the shares lack it."""
        return any(bucket.has_late_gradients for bucket in self.buckets)

    def reduce_late_gradients(self) -> None:
        """Add to the shares what was written late on any rank; all ranks must, if one has something.

        Communication: each bucket's reduction once more, awaited at once.
        """
        for bucket in self.buckets:
            late = bucket.release_late_gradients()
            share = self._reduce_scatter(bucket, late, late[bucket.share]).wait()
            for one in _start_sum(bucket, share):
                one.finish()
            self.gradient_share(bucket).add_(share)

    def gradient_share(self, bucket: Bucket) -> Tensor:
        """Return this rank's share of the summed gradients. Shapes: [share_numel]."""
        if self.options.zero_stage == 2:
            return self._shares[bucket]
        assert bucket.gradients is not None
        return bucket.gradients[bucket.share]

    def shares_changed(self) -> None:
        """Say that this rank updated its share of the parameters: the others' must be gathered before use."""
        self._is_stale = True

    def start_gather(self) -> None:
        """Start spreading the updated shares of the parameters to all replicas, unless that is done already."""
        if not self._is_stale:
            return
        self._is_stale = False
        for bucket in reversed(self.buckets):  # as the forward needs them
            share, whole = bucket.values[bucket.share], bucket.values
            pending = bucket.replicas.all_gather(share, Operation.PARAMS_ALL_GATHER, out=whole, chunk=self.number)
            if not self.options.has_overlap:
                pending.wait()
            self._gathers[bucket] = pending

    def use_parameters(self) -> None:
        """Wait until the forward may begin; by bucket, the parts of the model wait for their parameters themselves.

        Raises: RuntimeError where nobody has started to gather them.
        """
        if self._is_stale:
            raise RuntimeError(
                f"the parameters of chunk {self.number} were updated and not gathered since: the schedule has no "
                "GATHER before this forward"
            )
        if not self._is_by_bucket:
            self.finish_gather()

    def finish_gather(self) -> None:
        """Wait for the gathers under way."""
        self._await_gathers(list(self._gathers))

    def add_gradient(self, number: int, index: int, add: Addition) -> None:
        """Have `add` add to the gradient of parameter `index` of bucket `number`, and start the buckets that are whole.

        What comes when the bucket is on its way is kept apart, until all ranks sum it: see reduce_late_gradients.
        """
        bucket, is_late = self.buckets[number], number < self._num_started
        if is_late and not bucket.has_late_gradients:
            _logger.warning(
                "the gradient of %s is written more often than in the first step, after its bucket's reduction had "
                "started: the rest is summed in a second exchange, and the bucket no longer starts early",
                bucket.parameters[index].name,
            )
        add(*(bucket.take_late_gradient(index) if is_late else bucket.take_gradient(index)))
        if not self._is_counting:
            return
        self._counts.note(number, index)
        while self._num_started < len(self.buckets) and self._counts.is_whole(self._num_started):
            self._start_transfer(self.buckets[self._num_started])
            self._num_started += 1

    def _begin_window(self, num_microbatches: int) -> None:
        self._is_counting = self._is_by_bucket
        self._counts.begin(num_microbatches)

    def _await_gathers(self, buckets: Sequence[Bucket], *_: object) -> None:
        for bucket in buckets:
            pending = self._gathers.pop(bucket, None)
            if pending is not None:
                pending.wait()

    def _start_transfers(self) -> None:
        for bucket in self.buckets[self._num_started :]:
            self._start_transfer(bucket)
        if self._is_counting:
            self._counts.end()
        self._num_started, self._is_counting = 0, False
        if not self.options.has_overlap:
            self.finish_transfers()

    def _start_transfer(self, bucket: Bucket) -> None:
        options = self.options
        gradients = bucket.finished_gradients()
        share = gradients[bucket.share]
        if options.zero_stage == 2 and options.reduce_dtype != gradients.dtype and bucket.replicas.size > 1:
            share = torch.empty_like(share)  # a slice would keep all of them, of which a copy travels
        self._reductions.append(_Reduction(bucket, self._reduce_scatter(bucket, gradients, share)))
        if options.zero_stage == 2:
            bucket.gradients = None  # what is in flight keeps it alive

    def _reduce_scatter(self, bucket: Bucket, gradients: Tensor, share: Tensor) -> Pending:
        # a share that is not sent is not rounded
        whole = gradients.to(self.options.reduce_dtype) if bucket.replicas.size > 1 else gradients
        return bucket.replicas.reduce_scatter(
            whole, Operation.GRADS_REDUCE_SCATTER, out=share, chunk=self.number, has_wide_sum=True
        )

    def finish_transfers(self) -> None:
        """Wait for the reductions under way."""
        while self._reductions:
            reduction = self._reductions.pop(0)
            result = reduction.pending.wait()
            if self.options.zero_stage == 2:
                self._shares[reduction.bucket].add_(result)


@dataclass(frozen=True, slots=True, eq=False)
class _SumOfCopies:
    """Parts of a share that are summed end to end in `flat`, which is the part itself where there is one."""

    parts: Sequence[Tensor]
    flat: Tensor
    pending: Pending

    def finish(self) -> None:
        """Leave the sums in the share."""
        self.pending.wait()
        if len(self.parts) > 1:
            for part, summed in zip(self.parts, self.flat.split([part.numel() for part in self.parts]), strict=True):
                part.copy_(summed)


def _start_sum(bucket: Bucket, share: Tensor) -> list[_SumOfCopies]:
    """Start to sum what of this rank's `share` of a bucket has copies: one exchange, or none, on all of them alike."""
    group = bucket.sum_group
    parts = [share[one.start : one.stop] for one in bucket.stretches() if one.copies.group]
    if group is None or not parts:
        return []
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return [_SumOfCopies(parts, flat, group.all_reduce(flat, all_reduce_along(group.name)))]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _BucketSink:
    """The place of one parameter's gradient in its bucket."""

    chunk: ChunkDataParallel
    number: int
    """Of the bucket in the chunk."""
    index: int
    """Of the parameter in the bucket."""

    def add(self, add: Addition) -> None:
        self.chunk.add_gradient(self.number, self.index, add)

    def add_product(self, add: Addition) -> None:
        self.chunk.weight_products.run(lambda: self.add(add))

    def add_grad(self, parameter: Tensor) -> None:
        """Move what autograd left at the parameter, if anything, to the bucket."""
        if parameter.grad is not None:
            gradient, parameter.grad = parameter.grad, None
            self.add(lambda total, is_fresh: total.copy_(gradient) if is_fresh else total.add_(gradient))


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest parts of a module that are called by themselves: its children, of a container its entries."""
    for child in module.children():
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            yield from _parts(child)
        else:
            yield child


def _weakly(sink: _BucketSink) -> Callable[[Tensor], None]:
    """Return the hook of a parameter that has `sink`. torch's hooks are out of the garbage collector's sight.

    A hook that held its bucket, and with it the parameter, would keep the whole model and its groups for ever.
    """
    reference = weakref.ref(sink)

    def add_grad(parameter: Tensor) -> None:
        found = reference()
        if found is not None:  # or else the parameter has another sink by now
            found.add_grad(parameter)

    return add_grad
