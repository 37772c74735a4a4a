"""Zero bubble (ZB-H1): 1F1B whose backward is split, so that its half for the weights fills what would be idle.

Another stage waits for the gradient of an input, none for those of weights. Forwards and inputs' halves go in the order
of 1F1B, which gives gradients to the stage before as early as can be; the weights' half of a microbatch follows the
inputs' half of the microbatch `stage` later, and what is left at the end runs where 1F1B idles. So every stage has
pp_size microbatches in flight, as the first stage of 1F1B; with fewer, stages have nothing to fill the bubble with.
Source: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), sec. 2.
"""

from __future__ import annotations

from megatrain.schedule.action import Action, ActionKind
from megatrain.schedule.durations import ComputeDurations
from megatrain.schedule.one_f_one_b import one_f_one_b
from megatrain.schedule.order import ComputeOrder
from megatrain.schedule.placement import Placement


def zero_bubble(placement: Placement, num_microbatches: int) -> list[ComputeOrder]:
    """Return the compute order of each stage."""
    return [
        _with_split_backwards(order, stage, num_microbatches)
        for stage, order in enumerate(one_f_one_b(placement, num_microbatches))
    ]


def _with_split_backwards(order: ComputeOrder, num_put_off: int, num_microbatches: int) -> ComputeOrder:
    """Return the order with each backward in halves, the later one put off by `num_put_off` microbatches."""
    weights = [Action(ActionKind.BACKWARD_WEIGHT, 0, microbatch) for microbatch in range(num_microbatches)]
    split: ComputeOrder = []
    for compute in order:
        if compute.kind is ActionKind.FORWARD:
            split.append(compute)
            continue
        split.append(Action(ActionKind.BACKWARD_INPUT, 0, compute.microbatch))
        if compute.microbatch >= num_put_off:
            split.append(weights[compute.microbatch - num_put_off])
    return split + weights[max(0, num_microbatches - num_put_off) :]


def zero_bubble_in_flight(placement: Placement, num_microbatches: int) -> tuple[int, ...]:
    """Return the peak of forwards done less weights' halves done, by stage."""
    return (min(placement.pp_size, num_microbatches),) * placement.pp_size


def zero_bubble_idle(durations: ComputeDurations) -> float:
    """Return what a stage idles for each further stage: 1F1B's idle time, filled with weights' halves."""
    filled = min(durations.forward, durations.backward_input, durations.backward_weight)
    return durations.forward + durations.backward_input - filled
