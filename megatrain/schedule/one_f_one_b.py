"""1F1B: the bubble of GPipe, with at most pp_size activations held instead of num_microbatches.

Stage s runs pp_size - s - 1 warm-up forwards, until the first gradient can reach it, and then alternates.
Source: Narayanan et al., "PipeDream" (SOSP'19), in the flushing form of Megatron-LM (SC'21).
"""

from __future__ import annotations

from megatrain.schedule.action import Action, ActionKind
from megatrain.schedule.chunk_placement import ChunkPlacement
from megatrain.schedule.order import ComputeOrder, alternate


def one_f_one_b(placement: ChunkPlacement, num_microbatches: int) -> list[ComputeOrder]:
    """Return the compute order of each stage."""
    pp_size = placement.pp_size
    forwards = [Action(ActionKind.FORWARD, 0, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action(ActionKind.BACKWARD, 0, microbatch) for microbatch in range(num_microbatches)]
    return [alternate(forwards, backwards, min(num_microbatches, pp_size - stage - 1)) for stage in range(pp_size)]


def one_f_one_b_in_flight(placement: ChunkPlacement, num_microbatches: int) -> tuple[int, ...]:
    """Return each stage's peak of (forwards done - backwards done)."""
    return tuple(min(num_microbatches, placement.pp_size - stage) for stage in range(placement.pp_size))
