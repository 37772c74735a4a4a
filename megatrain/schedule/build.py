"""Builds schedules by name. Results are immutable and cached, because config check and trainer use the same ones.

Reductions may be aligned: all stages start the reduction of a chunk's gradients when the stage that finishes the chunk
latest is done. A reduction takes memory bandwidth and, on a GPU, processors from the compute that runs at the same
time. Stages that reduce at different times slow each other down one after the other, because each waits for its
neighbors. If all stages reduce at the same time, this delay occurs only once. The cost is that an earlier stage has
less compute left to overlap.
Source: the aligned gradient reduction of Megatron-LM.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from megatrain.contracts.errors import TopologyError
from megatrain.schedule.action import COMPUTES, Action, ActionKind, Schedule
from megatrain.schedule.chunk_placement import ChunkPlacement
from megatrain.schedule.execution import execute
from megatrain.schedule.interleaved import group_sizes
from megatrain.schedule.kinds import require_feasible
from megatrain.schedule.lowering import RECEIVES_AHEAD, lower
from megatrain.schedule.order import ComputeOrder

FORWARD_ONLY = "forward_only"


def align_reductions(schedule: Schedule) -> Schedule:
    """Return the schedule with each chunk's REDUCE moved behind the slot in which the latest stage can start it."""
    slots = execute(schedule).slots
    ready = [0] * schedule.num_chunks
    for actions, taken in zip(schedule.stages, slots, strict=True):
        for action, slot in _with_slots(actions, taken):
            if action.kind is ActionKind.REDUCE:
                ready[action.chunk] = max(ready[action.chunk], slot)
    stages = tuple(_aligned(actions, taken, ready) for actions, taken in zip(schedule.stages, slots, strict=True))
    return replace(schedule, stages=stages)


def _with_slots(actions: tuple[Action, ...], taken: tuple[int, ...]) -> list[tuple[Action, int]]:
    """Return each action with the slot of the last compute up to it, or -1 before the first compute."""
    found, slot, upcoming = [], -1, iter(taken)
    for action in actions:
        if action.kind in COMPUTES:
            slot = next(upcoming)
        found.append((action, slot))
    return found


def _aligned(actions: tuple[Action, ...], taken: tuple[int, ...], ready: list[int]) -> tuple[Action, ...]:
    held: list[Action] = []
    moved: list[Action] = []
    for action, slot in _with_slots(actions, taken):
        if action.kind is ActionKind.REDUCE:
            held.append(action)
            continue
        if action.kind in COMPUTES:
            moved += (action for action in held if ready[action.chunk] < slot)
            held = [action for action in held if ready[action.chunk] >= slot]
        moved.append(action)
    return (*moved, *held)


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
    has_aligned_reductions: all stages start to reduce a chunk at the same time (align_reductions).
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
