"""Interleaved 1F1B: num_chunks model chunks per stage divide the bubble by num_chunks.

Micro-batches pass through the chunks in groups: a group runs chunk 0, then chunk 1, and so on, before the next group
starts. A group needs at least pp_size micro-batches, or stage 0 waits for the wrap-around link at each change of chunk.
If pp_size does not divide num_microbatches, nearly equal groups of at least pp_size keep the bubble at its closed form,
at the cost of more activations in memory. The largest group comes first: if a later group were larger, the last stage
would reach backwards whose forwards have not run yet.
Source: Narayanan et al., Megatron-LM (SC'21) for the schedule and its warm-up, without uneven groups.
"""

from __future__ import annotations

from megatrain.schedule.action import Action, ActionKind
from megatrain.schedule.chunk_placement import ChunkPlacement
from megatrain.schedule.order import ComputeOrder, alternate


def group_sizes(pp_size: int, num_microbatches: int) -> list[int]:
    """Return the size of each group in micro-batches, largest first; all are pp_size if it divides num_microbatches."""
    num_groups = max(1, num_microbatches // pp_size)
    smallest, num_larger = divmod(num_microbatches, num_groups)
    return [smallest + 1] * num_larger + [smallest] * (num_groups - num_larger)


def _num_warmup(placement: ChunkPlacement, num_microbatches: int) -> list[int]:
    pp_size, num_chunks = placement.pp_size, placement.num_chunks
    largest_group = group_sizes(pp_size, num_microbatches)[0]
    return [
        min(num_microbatches * num_chunks, 2 * (pp_size - stage - 1) + (num_chunks - 1) * largest_group)
        for stage in range(pp_size)
    ]


def interleaved(placement: ChunkPlacement, num_microbatches: int) -> list[ComputeOrder]:
    """Return the compute order of each stage."""
    forwards: list[Action] = []
    backwards: list[Action] = []
    first = 0
    for size in group_sizes(placement.pp_size, num_microbatches):
        group = range(first, first + size)
        for chunk in range(placement.num_chunks):
            forwards += (Action(ActionKind.FORWARD, chunk, microbatch) for microbatch in group)
        for chunk in reversed(range(placement.num_chunks)):
            backwards += (Action(ActionKind.BACKWARD, chunk, microbatch) for microbatch in group)
        first += size
    return [alternate(forwards, backwards, num_warmup) for num_warmup in _num_warmup(placement, num_microbatches)]


def interleaved_in_flight(placement: ChunkPlacement, num_microbatches: int) -> tuple[int, ...]:
    """Return each stage's peak of (forwards done - backwards done)."""
    num_forwards = num_microbatches * placement.num_chunks
    return tuple(min(num_forwards, num_warmup + 1) for num_warmup in _num_warmup(placement, num_microbatches))
