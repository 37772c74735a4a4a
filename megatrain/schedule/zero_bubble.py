"""Zero bubble (ZB-H1): 1F1B with each backward split into dgrad and wgrad, so that wgrads fill the idle time.

Another stage waits for a dgrad, but no stage waits for a wgrad. Forwards and dgrads keep the order of 1F1B, which sends
gradients to the previous stage as early as possible. The wgrad of a micro-batch follows the dgrad of the micro-batch
that comes `stage` micro-batches later, and the remaining wgrads run at the end, where 1F1B idles. So every stage has
pp_size micro-batches in flight, like the first stage of 1F1B. With fewer micro-batches, there are too few wgrads to
fill the bubble.
Source: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), sec. 2.
"""

from __future__ import annotations

from megatrain.schedule.action import Action, ActionKind
from megatrain.schedule.chunk_placement import ChunkPlacement
from megatrain.schedule.one_f_one_b import one_f_one_b
from megatrain.schedule.order import ComputeDurations, ComputeOrder


def zero_bubble(placement: ChunkPlacement, num_microbatches: int) -> list[ComputeOrder]:
    """Return the compute order of each stage."""
    return [
        _with_split_backwards(order, stage, num_microbatches)
        for stage, order in enumerate(one_f_one_b(placement, num_microbatches))
    ]


def _with_split_backwards(order: ComputeOrder, num_deferred: int, num_microbatches: int) -> ComputeOrder:
    """Return the order with each backward split, and the wgrad deferred by `num_deferred` micro-batches."""
    wgrads = [Action(ActionKind.WGRAD, 0, microbatch) for microbatch in range(num_microbatches)]
    split: ComputeOrder = []
    for compute in order:
        if compute.kind is ActionKind.FORWARD:
            split.append(compute)
            continue
        split.append(Action(ActionKind.DGRAD, 0, compute.microbatch))
        if compute.microbatch >= num_deferred:
            split.append(wgrads[compute.microbatch - num_deferred])
    return split + wgrads[max(0, num_microbatches - num_deferred) :]


def zero_bubble_in_flight(placement: ChunkPlacement, num_microbatches: int) -> tuple[int, ...]:
    """Return each stage's peak of (forwards done - wgrads done)."""
    return (min(placement.pp_size, num_microbatches),) * placement.pp_size


def zero_bubble_idle(durations: ComputeDurations) -> float:
    """Return the idle time of a stage per additional stage: 1F1B's idle time, less the wgrads that fill it."""
    filled = min(durations.forward, durations.dgrad, durations.wgrad)
    return durations.forward + durations.dgrad - filled
