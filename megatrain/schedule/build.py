"""Build a schedule by name. Results are immutable and cached, because config check and trainer ask for the same one."""

from __future__ import annotations

from functools import lru_cache

from megatrain.contracts.errors import TopologyError
from megatrain.schedule.action import Action, ActionKind, Schedule
from megatrain.schedule.alignment import align_reductions
from megatrain.schedule.chunk_placement import ChunkPlacement
from megatrain.schedule.interleaved import group_sizes
from megatrain.schedule.kinds import require_feasible
from megatrain.schedule.lowering import RECEIVES_AHEAD, lower
from megatrain.schedule.order import ComputeOrder

FORWARD_ONLY = "forward_only"


@lru_cache(maxsize=16)
def build_schedule(
    name: str,
    pp_size: int,
    num_chunks: int,
    num_microbatches: int,
    receives_ahead: int = 1,
    has_aligned_reductions: bool = False,
) -> Schedule:
    """Return the action lists of one training step.

    receives_ahead: computes between posting a receive and its consumer; 0 exposes the whole transfer.
    has_aligned_reductions: see alignment.py.
    Raises: TopologyError with the rule and a hint when `infeasibility` finds a problem.
    """
    kind = require_feasible(name, pp_size, num_chunks, num_microbatches)
    placement = kind.placement(pp_size, num_chunks)
    actions = lower(kind.generate(placement, num_microbatches), placement, num_microbatches, receives_ahead)
    schedule = Schedule(name, placement, num_microbatches, actions)
    return align_reductions(schedule) if has_aligned_reductions else schedule


@lru_cache(maxsize=16)
def forward_only(placement: ChunkPlacement, num_microbatches: int, receives_ahead: int = RECEIVES_AHEAD) -> Schedule:
    """Return the action lists of an evaluation: forwards and their messages, gathers, and no reduce.

    Any num_microbatches of at least 1 is allowed: with fewer than pp_size each change of chunk stalls, but no stage
    blocks.
    Raises: TopologyError when a size is below 1.
    """
    pp_size, num_chunks = placement.pp_size, placement.num_chunks
    if min(pp_size, num_chunks, num_microbatches) < 1:
        raise TopologyError(
            f"no forward pipeline of pp_size={pp_size}, num_chunks={num_chunks}, num_microbatches={num_microbatches}: "
            "each must be at least 1"
        )
    order: ComputeOrder = []
    first = 0
    for size in group_sizes(pp_size, num_microbatches):
        for chunk in range(num_chunks):
            order += (Action(ActionKind.FORWARD, chunk, first + index) for index in range(size))
        first += size
    actions = lower([order] * pp_size, placement, num_microbatches, receives_ahead)
    return Schedule(FORWARD_ONLY, placement, num_microbatches, actions)
