"""GPipe: all forwards, then all backwards. Every activation of the step is held at the turn.

Source: Huang et al., "GPipe" (NeurIPS'19).
"""

from __future__ import annotations

from megatrain.schedule.action import Action, ActionKind
from megatrain.schedule.order import ComputeOrder, weave
from megatrain.schedule.placement import Placement


def gpipe(placement: Placement, num_microbatches: int) -> list[ComputeOrder]:
    """Return the compute order of each stage."""
    forwards = [Action(ActionKind.FORWARD, 0, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action(ActionKind.BACKWARD, 0, microbatch) for microbatch in range(num_microbatches)]
    return [weave(forwards, backwards, num_microbatches) for _ in range(placement.pp_size)]


def gpipe_in_flight(placement: Placement, num_microbatches: int) -> tuple[int, ...]:
    """Return the peak of forwards done less backwards done, by stage."""
    return (num_microbatches,) * placement.pp_size
