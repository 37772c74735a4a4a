"""The parts of the model on each stage; the checker also proves schedules of V-shaped placements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.schedule import Action, ActionKind, ChunkPlacement, Schedule, check_schedule, forward_only, render
from megatrain.schedule.lowering import lower
from megatrain.schedule.order import ComputeOrder

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
LOOPED, V = ChunkPlacement(3, 4), ChunkPlacement(3, 4, is_v_shaped=True)


def test_chunks_are_assigned_in_turns() -> None:
    assert [LOOPED.stage_and_chunk(number) for number in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert [V.stage_and_chunk(number) for number in range(9)] == [
        (0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1), (0, 2), (1, 2), (2, 2),
    ]  # fmt: skip
    assert V.is_first(0, 0)
    assert V.is_last(0, 3)
    assert LOOPED.is_last(2, 3)


@pytest.mark.parametrize(
    "placement", [LOOPED, V, ChunkPlacement(1, 4), ChunkPlacement(1, 4, is_v_shaped=True), ChunkPlacement(5, 1)]
)
def test_stage_and_chunk_and_model_chunk_are_each_others_inverse(placement: ChunkPlacement) -> None:
    pairs = [placement.stage_and_chunk(number) for number in range(placement.num_parts)]
    assert len(set(pairs)) == placement.num_parts
    assert [placement.model_chunk(*pair) for pair in pairs] == list(range(placement.num_parts))


def v_schedule(num_microbatches: int = 4) -> Schedule:
    """Return all forwards, first those of chunk 0, then all backwards in the reverse order, on 3 stages in a V."""
    placement = ChunkPlacement(3, 2, is_v_shaped=True)
    order: ComputeOrder = [Action(F, chunk, micro) for chunk in (0, 1) for micro in range(num_microbatches)]
    order += [Action(B, chunk, micro) for chunk in (1, 0) for micro in range(num_microbatches)]
    return Schedule("experiment", placement, num_microbatches, lower([order] * 3, placement, num_microbatches))


def test_a_v_shaped_schedule_is_proved_right() -> None:
    schedule = v_schedule()
    assert check_schedule(schedule) == []
    assert check_schedule(forward_only(V, 5)) == []
    # The forward that computes the loss is on stage 0, after the first micro-batch has returned to it.
    assert render(schedule).splitlines()[0].startswith("stage 0 | F0a F1a F2a F3a .   .   .   .   F0b F1b")
    # Stage 0 gets no message about its own next action, and the last stage sends the turning point to itself.
    sent = [action for action in schedule.stages[0] if action.kind is ActionKind.SEND_FORWARD]
    assert {action.chunk for action in sent} == {0}
    assert Action(ActionKind.RECV_FORWARD, 1, 0) in schedule.stages[2]


def test_a_v_shaped_schedule_is_wrong_under_a_looped_placement() -> None:
    problems = check_schedule(replace(v_schedule(), placement=ChunkPlacement(3, 2)))
    assert any("forward channel" in problem for problem in problems)
    assert any("is missing" in problem for problem in problems)


def test_messages_of_a_v_in_the_wrong_order_are_found() -> None:
    schedule = v_schedule()
    stage = list(schedule.stages[1])
    one, other = Action(ActionKind.SEND_FORWARD, 1, 0), Action(ActionKind.SEND_FORWARD, 1, 1)
    first, second = stage.index(one), stage.index(other)
    stage[first], stage[second] = other, one
    broken = replace(schedule, stages=(schedule.stages[0], tuple(stage), schedule.stages[2]))
    assert any("forward channel 1->0, message 0" in problem for problem in check_schedule(broken))
