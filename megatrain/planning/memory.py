"""How much memory a rank's tensors take in a training step, computed without running a step.

Permanent: parameters, gradients, optimizer state, inputs. Temporary: activations of the micro-batches in flight,
temporaries of the running action, messages, gradients in transfer. The peak is that of forward and backward, or that of
the update: most updates work in place, but Muon's exchanges whole matrices (update.py). The memory of a chunk is
counted while it runs on meta; rules give the memory of messages and reductions. The rules assume that no gradient's
reduction ends before it is awaited. With fast peers less memory is used, so the result is an upper bound. Not counted:
what an allocator rounds up, and what operations and communication libraries use internally. benchmarks/memory.py
compares the result with counted tensor bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from megatrain.chunks.builder import hidden_shape
from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.ops.precision import DTYPES, accumulate_dtype
from megatrain.parallel.bucket import Bucket
from megatrain.planning.chunks import PlannedChunk, planned_kind
from megatrain.planning.step_memory import ChunkMemory, Moment, StepWalk
from megatrain.planning.update import IN_PLACE, PlannedUpdate
from megatrain.schedule import peak_in_flight

_KINDS = ("parameters", "gradients", "optimizer", "inputs", "activations", "working", "messages", "traveling")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank's tensors at the peak of a step."""

    parameters: int
    gradients: int
    optimizer: int
    """Master weights, unless these are the parameters themselves, and the moments that the update rules keep."""
    inputs: int
    """Tokens, labels and documents of a step, rotary tables."""
    activations: int
    """Kept for backward by the micro-batches in flight."""
    working: int
    """Temporaries of the action that runs at that moment."""
    messages: int
    """Activations and gradients that come from other stages or go to them."""
    traveling: int
    """Gradients in transfer: copies that are being reduced."""
    moment: str
    """The action that runs at the peak."""
    num_in_flight: int
    """The largest number of micro-batches of a chunk between forward and backward."""
    on_host: int = 0
    """The peak of activations that wait in host memory; not part of the total, which is device memory."""

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind, in the order of the fields."""
        return {kind: getattr(self, kind) for kind in _KINDS}


def estimate_memory(
    config: Config, layout: Layout, stage: int, chunks: Sequence[PlannedChunk], update: PlannedUpdate = IN_PLACE
) -> RankMemory:
    """Return the memory of every rank of `stage`; all dp and tp ranks of a stage need the same.

    chunks: from plan_stage. update: from plan_update.
    Raises: TopologyError when the schedule cannot be built.
    """
    parallel, dtype = config.parallel, DTYPES[config.train.precision]
    sum_bytes = accumulate_dtype(dtype).itemsize
    buckets = [bucket for chunk in chunks for bucket in chunk.buckets]
    num_elements, num_sharded = sum(bucket.numel for bucket in buckets), sum(bucket.shard_numel for bucket in buckets)
    has_own_master = sum_bytes != dtype.itemsize

    num_microbatches = config.num_microbatches(layout)
    schedule = parallel.build_schedule(num_microbatches)
    walk = StepWalk(config, stage, [_chunk_memory(config, chunk) for chunk in chunks], message_bytes(config, layout))
    peak = max(
        walk.run(schedule.stages[stage]),
        Moment("update", working=update.working),
        key=lambda moment: moment.total,
    )
    return RankMemory(
        parameters=num_elements * dtype.itemsize,
        gradients=(num_sharded if parallel.zero_stage == 2 else num_elements) * sum_bytes,
        optimizer=sum(bucket.shard_numel * (len(bucket.rule.state_kinds) + has_own_master) for bucket in buckets)
        * sum_bytes,
        inputs=num_microbatches * chunks[0].micro_batch_bytes + sum(chunk.measured.tables for chunk in chunks),
        activations=peak.activations,
        working=peak.working,
        messages=peak.messages,
        traveling=peak.traveling,
        moment=peak.what,
        num_in_flight=peak_in_flight(schedule)[stage],
        on_host=walk.peak_on_host,
    )


def message_bytes(config: Config, layout: Layout) -> int:
    """Return the bytes of the tensor that a rank sends to the next stage for a micro-batch."""
    return math.prod(hidden_shape(config, layout.tp_size)) * DTYPES[config.train.precision].itemsize


class _ReductionBytes(NamedTuple):
    """Bytes of one bucket's gradients during their reduction: see ChunkMemory."""

    whole: int
    traveling: int
    arriving: int
    summed: int
    copied: int


def _chunk_memory(config: Config, chunk: PlannedChunk) -> ChunkMemory:
    reductions = [_reduction(config, bucket) for bucket in chunk.buckets]
    traveling = [reduction.traveling for reduction in reductions]
    # a lane starts two exchanges, so two buckets have receive buffers: the one in transfer and the next one
    arriving = [
        sum(reduction.arriving for reduction in reductions[first : first + 2]) for first in range(len(reductions))
    ]
    exchanged = _max_additional(arriving, traveling)
    return ChunkMemory(
        footprint=chunk.measured.footprint,
        whole_gradients=sum(reduction.whole for reduction in reductions),
        traveling=sum(traveling),
        exchanged=exchanged,
        summed=_max_additional(
            [received + reduction.summed for received, reduction in zip(arriving, reductions, strict=True)], traveling
        )
        - exchanged,
        copied=_max_additional(
            [reduction.copied for reduction in reductions],
            [reduction.whole - reduction.traveling if reduction.copied else 0 for reduction in reductions],
        ),
        borrowed_gradients=sum(_reduction(config, bucket).whole for bucket in chunk.borrowed),
    )


def _reduction(config: Config, bucket: Bucket) -> _ReductionBytes:
    """Return the bytes of one bucket. ZeRO-1 reduces gradients in place. ZeRO-2 frees them and keeps its shard. A copy
    is sent if gradients are reduced in another dtype."""
    sum_bytes = accumulate_dtype(DTYPES[config.train.precision]).itemsize
    is_alone, is_zero_2 = bucket.replicas.size == 1, config.parallel.zero_stage == 2
    is_copied = config.parallel.grad_reduce_dtype == "bf16" and not is_alone
    whole = bucket.numel * sum_bytes
    sent = bucket.numel * torch.bfloat16.itemsize if is_copied else whole
    traveling = sent if is_copied or is_zero_2 else 0
    if is_copied and is_zero_2:  # the shard of a copy has its own memory
        traveling += bucket.shard_numel * sum_bytes
    # if ranks exchange parts and sum them (Group.reduce_scatter), the received parts have their own memory: on CPUs
    # from the exchange's turn on, else from its start on; half precision is summed in a wider copy
    arriving = sent if planned_kind(config).type == "cpu" and not is_alone else 0
    if is_copied and not arriving:
        traveling += sent
    summed = bucket.shard_numel * torch.float32.itemsize if is_copied else 0
    return _ReductionBytes(whole, traveling, arriving, summed, traveling if is_copied and is_zero_2 else 0)


def _max_additional(beside: Sequence[int], traveling: Sequence[int]) -> int:
    """Return the most bytes beyond those of all gradients in transfer, while the buckets' reductions end in order.

    beside: for each bucket, the additional bytes while its reduction ends. traveling: the bytes that are freed then.
    """
    return max(now - ended for now, ended in zip(beside, accumulate(traveling, initial=0), strict=False))
