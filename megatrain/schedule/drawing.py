"""Draws a schedule as text, for documentation, tests and programs of users."""

from __future__ import annotations

from string import ascii_lowercase

from megatrain.schedule.action import COMPUTES, Action, ActionKind, Schedule
from megatrain.schedule.execution import execute

_LETTERS = {
    ActionKind.FORWARD: "F",
    ActionKind.BACKWARD: "B",
    ActionKind.DGRAD: "I",
    ActionKind.WGRAD: "W",
}


def render(schedule: Schedule) -> str:
    """Return the drawing. A cell is F or B, the micro-batch, and with several chunks a letter for the chunk; a dot is
    an idle slot.

    If backward is split, I is the dgrad and W is the wgrad. Every compute takes one slot and messages take none, so
    columns show order and bubble, not time.
    """
    execution = execute(schedule)
    num_slots = max((slots[-1] + 1 for slots in execution.slots if slots), default=0)
    width = len(f"F{schedule.num_microbatches - 1}{_chunk_label(schedule, schedule.num_chunks - 1)}")
    label_width = len(f"stage {schedule.pp_size - 1}")
    rows = []
    for stage, (actions, slots) in enumerate(zip(schedule.stages, execution.slots, strict=True)):
        computes = [action for action in actions if action.kind in COMPUTES]
        cells = dict(zip(slots, (_cell(schedule, action) for action in computes), strict=False))
        row = " ".join(cells.get(slot, ".").ljust(width) for slot in range(num_slots))
        rows.append(f"{f'stage {stage}':{label_width}} | {row}".rstrip())
    return "\n".join(rows)


def _cell(schedule: Schedule, action: Action) -> str:
    return f"{_LETTERS[action.kind]}{action.microbatch}{_chunk_label(schedule, action.chunk)}"


def _chunk_label(schedule: Schedule, chunk: int) -> str:
    if schedule.num_chunks == 1:
        return ""
    return ascii_lowercase[chunk] if schedule.num_chunks <= len(ascii_lowercase) else f".{chunk}"
