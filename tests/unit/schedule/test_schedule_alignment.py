"""Aligned reductions start in one slot on all stages, as early as the last stage can, and change nothing else."""

from __future__ import annotations

import pytest

from megatrain.schedule import COMPUTES, Action, ActionKind, Schedule, build_schedule, check_schedule
from megatrain.schedule.execution import execute

CASES = [
    ("gpipe", 3, 1, 4),
    ("1f1b", 4, 1, 6),
    ("zero_bubble", 4, 1, 8),
    ("interleaved", 2, 2, 4),
    ("interleaved", 4, 3, 5),
    ("interleaved", 1, 4, 2),
]


def slots_around(schedule: Schedule) -> list[dict[int, tuple[int, float]]]:
    """Return, by stage and chunk, the slots of the computes before and after the chunk's reduction."""
    found = []
    for actions, slots in zip(schedule.stages, execute(schedule).slots, strict=True):
        before: dict[int, tuple[int, float]] = {}
        taken, upcoming = -1, iter([*slots, float("inf")])
        following = next(upcoming)
        for action in actions:
            if action.kind in COMPUTES:
                taken, following = int(following), next(upcoming)
            elif action.kind is ActionKind.REDUCE:
                before[action.chunk] = (taken, following)
        found.append(before)
    return found


def without_reductions(schedule: Schedule) -> list[list[Action]]:
    return [[action for action in actions if action.kind is not ActionKind.REDUCE] for actions in schedule.stages]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_all_stages_reduce_in_the_slot_of_the_last_stage(case: tuple[str, int, int, int]) -> None:
    plain, aligned = build_schedule(*case), build_schedule(*case, has_aligned_reductions=True)

    assert check_schedule(aligned) == []
    assert without_reductions(aligned) == without_reductions(plain)
    assert execute(aligned).slots == execute(plain).slots
    for chunk in range(plain.num_chunks):
        earliest = max(stage[chunk][0] for stage in slots_around(plain))
        for before, after in (stage[chunk] for stage in slots_around(aligned)):
            assert before <= earliest < after


def test_stages_that_are_done_earlier_wait() -> None:
    last_stage = build_schedule("interleaved", 4, 2, 4, has_aligned_reductions=True).stages[3]
    assert last_stage != build_schedule("interleaved", 4, 2, 4).stages[3]
