"""GPipe: all forwards, then all backwards. After the last forward a stage holds every activation of the step.

Source: Huang et al., "GPipe" (NeurIPS'19).
"""

from __future__ import annotations

from megatrain.schedule.action import Action, ActionKind
from megatrain.schedule.chunk_placement import ChunkPlacement
from megatrain.schedule.order import ComputeOrder, alternate


def gpipe(placement: ChunkPlacement, num_microbatches: int) -> list[ComputeOrder]:
    """Return the compute order of each stage."""
    forwards = [Action(ActionKind.FORWARD, 0, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action(ActionKind.BACKWARD, 0, microbatch) for microbatch in range(num_microbatches)]
    return [alternate(forwards, backwards, num_microbatches) for _ in range(placement.pp_size)]


def gpipe_in_flight(placement: ChunkPlacement, num_microbatches: int) -> tuple[int, ...]:
    """Return each stage's peak of (forwards done - backwards done)."""
    return (num_microbatches,) * placement.pp_size
