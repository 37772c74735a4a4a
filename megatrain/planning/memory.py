"""How much memory a rank's tensors take in a training step, found without running one.

Standing: parameters, gradients, optimizer state, inputs. Passing: activations of the micro-batches in flight, what the
running part works with, messages, gradients on their way. The peak is the largest moment of forward and backward; an
update works in place. What a chunk needs is counted while it runs on meta; what passes between chunks and ranks follows
rules. No gradient's exchange ends before it is awaited: where peers are fast there is less, so this is the most.
Not counted: what an allocator rounds up, what operations and communication libraries use inside.
Measured against counted tensor bytes by benchmarks/memory.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from megatrain.chunk_builder import hidden_shape
from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.ops.precision import DTYPES, accumulate_dtype
from megatrain.parallel.bucket import Bucket
from megatrain.planning.chunks import PlannedChunk, planned_kind
from megatrain.planning.step_memory import ChunkMemory, StepWalk
from megatrain.schedule import peak_in_flight


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank's tensors at the fullest moment of a step."""

    parameters: int
    gradients: int
    optimizer: int
    """Master weights, where they are not the parameters themselves, and two moments."""
    inputs: int
    """Tokens, labels and documents of a step, rotary tables."""
    activations: int
    """Kept for backward by the micro-batches in flight."""
    working: int
    """Temporaries of what runs at that moment."""
    messages: int
    """Activations and gradients that come from, or go to, other stages."""
    travelling: int
    """Copies of gradients that are reduced."""
    moment: str
    """What runs when most is alive."""
    num_in_flight: int
    """Most micro-batches of a chunk between forward and backward."""
    on_host: int = 0
    """Activations that wait in host memory, at most; not part of the total, which is the device's."""

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind, in the order of the fields."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "inputs": self.inputs,
            "activations": self.activations,
            "working": self.working,
            "messages": self.messages,
            "travelling": self.travelling,
        }


def estimate_memory(config: Config, layout: Layout, stage: int, chunks: Sequence[PlannedChunk]) -> RankMemory:
    """Return the memory of every rank of `stage`; dp and tp ranks of a stage are alike.

    chunks: from plan_stage.
    Raises: TopologyError when the schedule cannot be built.
    """
    parallel, dtype = config.parallel, DTYPES[config.train.precision]
    sum_bytes = accumulate_dtype(dtype).itemsize
    buckets = [bucket for chunk in chunks for bucket in chunk.buckets]
    num_elements, num_shared = sum(one.numel for one in buckets), sum(one.share_numel for one in buckets)
    has_own_master = sum_bytes != dtype.itemsize

    num_microbatches = config.num_microbatches(layout.dp_size)
    schedule = parallel.build_schedule(num_microbatches)
    message = math.prod(hidden_shape(config, layout.tp_size)) * dtype.itemsize
    walk = StepWalk(config, stage, [_chunk_memory(config, chunk) for chunk in chunks], message)
    peak = walk.run(schedule.stages[stage])
    return RankMemory(
        parameters=num_elements * dtype.itemsize,
        gradients=(num_shared if parallel.zero_stage == 2 else num_elements) * sum_bytes,
        optimizer=num_shared * sum_bytes * (3 if has_own_master else 2),
        inputs=num_microbatches * chunks[0].micro_batch_bytes + sum(chunk.measured.tables for chunk in chunks),
        activations=peak.activations,
        working=peak.working,
        messages=peak.messages,
        travelling=peak.travelling,
        moment=peak.what,
        num_in_flight=peak_in_flight(schedule)[stage],
        on_host=walk.most_on_host,
    )


class _Reduction(NamedTuple):
    """Bytes of one bucket's gradients while they are reduced: see ChunkMemory."""

    whole: int
    travelling: int
    arriving: int
    summed: int
    copied: int


def _chunk_memory(config: Config, chunk: PlannedChunk) -> ChunkMemory:
    reductions = [_reduction(config, bucket) for bucket in chunk.buckets]
    travelling = [one.travelling for one in reductions]
    # there is room for what arrives of the bucket that travels and of the next one
    arriving = [sum(one.arriving for one in reductions[first : first + 2]) for first in range(len(reductions))]
    exchanged = _most(arriving, travelling)
    return ChunkMemory(
        footprint=chunk.measured.footprint,
        whole_gradients=sum(one.whole for one in reductions),
        travelling=sum(travelling),
        exchanged=exchanged,
        summed=_most([room + one.summed for room, one in zip(arriving, reductions, strict=True)], travelling)
        - exchanged,
        copied=_most(
            [one.copied for one in reductions], [one.whole - one.travelling if one.copied else 0 for one in reductions]
        ),
    )


def _reduction(config: Config, bucket: Bucket) -> _Reduction:
    """ZeRO-1 reduces gradients in place, ZeRO-2 lets them go and keeps its share; in another type a copy travels."""
    sum_bytes = accumulate_dtype(DTYPES[config.train.precision]).itemsize
    is_alone, is_zero_2 = bucket.replicas.size == 1, config.parallel.zero_stage == 2
    is_copied = config.parallel.grad_reduce_dtype == "bf16" and not is_alone
    whole = bucket.numel * sum_bytes
    sent = bucket.numel * torch.bfloat16.itemsize if is_copied else whole
    travelling = sent if is_copied or is_zero_2 else 0
    if is_copied and is_zero_2:  # the share of a copy is no part of it
        travelling += bucket.share_numel * sum_bytes
    # where ranks exchange their parts and sum them themselves (Group.reduce_scatter), what arrives has memory of its
    # own: on CPUs when it has its turn, else from the start on; half precision is summed in a wider copy
    arriving = sent if planned_kind(config).type == "cpu" and not is_alone else 0
    if is_copied and not arriving:
        travelling += sent
    summed = bucket.share_numel * torch.float32.itemsize if is_copied else 0
    return _Reduction(whole, travelling, arriving, summed, travelling if is_copied and is_zero_2 else 0)


def _most(beside: Sequence[int], travelling: Sequence[int]) -> int:
    """Return the most bytes beside all that travels, where bucket after bucket ends and lets go of what travelled.

    beside: of each bucket, what is there while it ends.
    """
    return max(now - ended for now, ended in zip(beside, accumulate(travelling, initial=0), strict=False))
