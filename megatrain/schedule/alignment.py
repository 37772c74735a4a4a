"""Make all stages start the reduction of a chunk's gradients when the stage that finishes the chunk latest is done.

A reduction takes memory bandwidth and, on a GPU, processors from the compute that runs at the same time. Stages that
reduce at different times slow each other down one after the other, because each waits for its neighbours. Stages that
reduce together are slow only once. The price is that an earlier stage has less compute left to overlap.
Source: the aligned gradient reduction of Megatron-LM.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.schedule.action import COMPUTES, Action, ActionKind, Schedule
from megatrain.schedule.execution import execute


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
            moved += (one for one in held if ready[one.chunk] < slot)
            held = [one for one in held if ready[one.chunk] >= slot]
        moved.append(action)
    return (*moved, *held)
