"""An invalid schedule of each kind is reported with stage, position and action; deadlocks have an oracle."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from megatrain.contracts.errors import TopologyError
from megatrain.schedule import (
    Action,
    ActionKind,
    ChunkPlacement,
    Schedule,
    build_schedule,
    check_schedule,
    forward_only,
)
from megatrain.schedule.execution import execute
from megatrain.schedule.interleaved import interleaved
from megatrain.schedule.lowering import lower
from megatrain.schedule.order import alternate
from tests.helpers.timed_schedules import graph_of_streams

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.DGRAD, ActionKind.WGRAD


def act(kind: ActionKind, microbatch: int, chunk: int = 0) -> Action:
    return Action(kind, chunk, microbatch)


def with_stage(schedule: Schedule, stage: int, actions: list[Action]) -> Schedule:
    return replace(schedule, stages=(*schedule.stages[:stage], tuple(actions), *schedule.stages[stage + 1 :]))


def without(schedule: Schedule, stage: int, action: Action) -> Schedule:
    return with_stage(schedule, stage, [other for other in schedule.stages[stage] if other != action])


def swapped(schedule: Schedule, stage: int, action: Action, other: Action) -> Schedule:
    actions = list(schedule.stages[stage])
    a, b = actions.index(action), actions.index(other)
    actions[a], actions[b] = actions[b], actions[a]
    return with_stage(schedule, stage, actions)


def expect_one_problem(schedule: Schedule, *texts: str) -> str:
    """Return the only problem that contains all these texts."""
    found = [problem for problem in check_schedule(schedule) if all(word in problem for word in texts)]
    assert len(found) == 1, check_schedule(schedule)
    return found[0]


SCHEDULES = {
    "1f1b": build_schedule("1f1b", 2, 1, 4),
    "interleaved": build_schedule("interleaved", 2, 2, 4),
    "zero_bubble": build_schedule("zero_bubble", 3, 1, 5),
}


@pytest.fixture
def schedule() -> Schedule:
    return SCHEDULES["1f1b"]


@pytest.fixture
def split() -> Schedule:
    return SCHEDULES["zero_bubble"]


def test_backward_before_its_forward_is_reported(schedule: Schedule) -> None:
    broken = swapped(schedule, 1, act(FORWARD, 2), act(BACKWARD, 2))
    position = schedule.stages[1].index(act(FORWARD, 2))
    problem = expect_one_problem(broken, "a forward comes before its backward")
    assert problem.startswith(f"stage 1, position {position}, BACKWARD(chunk=0, microbatch=2): comes before FORWARD(")


def test_missing_send_is_reported_and_so_is_what_it_blocks(schedule: Schedule) -> None:
    broken = without(schedule, 0, act(ActionKind.SEND_FORWARD, 3))
    expect_one_problem(broken, "stage 0: SEND_FORWARD(chunk=0, microbatch=3) is missing")
    expect_one_problem(
        broken, "forward channel 0->1, message 3: sent by nothing on stage 0, received by stage 1, position"
    )
    waiting = schedule.stages[1].index(act(FORWARD, 3))
    expect_one_problem(
        broken, f"deadlock: stage 1, position {waiting}, FORWARD(chunk=0, microbatch=3): waits for message 3"
    )
    expect_one_problem(broken, "deadlock: stage 0", "the backward channel 1->0, but stage 1 itself stops at position")


def test_missing_receive_is_reported(schedule: Schedule) -> None:
    broken = without(schedule, 0, act(ActionKind.RECV_BACKWARD, 1))
    expect_one_problem(broken, "stage 0: RECV_BACKWARD(chunk=0, microbatch=1) is missing")
    expect_one_problem(
        broken, "backward channel 1->0, message 1", "microbatch=1), received by", "RECV_BACKWARD", "microbatch=2)"
    )


GATHER, REDUCE = Action(ActionKind.GATHER, 1, -1), Action(ActionKind.REDUCE, 0, -1)


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("1f1b", act(BACKWARD, 0)),
        ("1f1b", Action(ActionKind.GATHER, 0, -1)),
        ("1f1b", REDUCE),
        ("zero_bubble", act(INPUT, 3)),
        ("zero_bubble", act(WEIGHT, 3)),
    ],
)
def test_missing_action_is_reported(name: str, action: Action) -> None:
    expect_one_problem(without(SCHEDULES[name], 1, action), f"stage 1: {action} is missing")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("1f1b", BACKWARD),
        ("1f1b", ActionKind.RECV_FORWARD),
        ("1f1b", ActionKind.SEND_BACKWARD),
        ("zero_bubble", INPUT),
        ("zero_bubble", WEIGHT),
    ],
)
def test_duplicate_action_is_reported(name: str, kind: ActionKind) -> None:
    actions = list(SCHEDULES[name].stages[1])
    first = actions.index(act(kind, 1))
    broken = with_stage(SCHEDULES[name], 1, [*actions, act(kind, 1)])
    expect_one_problem(broken, f"stage 1, position {len(actions)}, {act(kind, 1)}: already at position {first}")


@pytest.mark.parametrize(
    ("name", "stage", "action", "other", "reported"),
    [
        (
            "1f1b", 1, act(ActionKind.RECV_FORWARD, 0), act(FORWARD, 0),
            ("position", "FORWARD(chunk=0, microbatch=0)", "a receive is posted before its consumer"),
        ),
        (
            "1f1b", 0, act(ActionKind.SEND_FORWARD, 0), act(FORWARD, 0),
            ("position", "SEND_FORWARD(chunk=0, microbatch=0)", "sent after it is computed"),
        ),
        (
            "interleaved", 0, GATHER, act(FORWARD, 1, chunk=1),
            ("FORWARD(chunk=1, microbatch=0): comes before GATHER(chunk=1)", "gathered before"),
        ),
        (
            "1f1b", 1, REDUCE, act(BACKWARD, 3),
            ("REDUCE(chunk=0): comes before BACKWARD(chunk=0, microbatch=3)", "after its last"),
        ),
        (
            "zero_bubble", 0, act(INPUT, 1), act(WEIGHT, 1),
            ("WGRAD(chunk=0, microbatch=1): comes before DGRAD", "deferred wgrads run after their dgrad"),
        ),
        (
            "zero_bubble", 2, act(INPUT, 0), act(FORWARD, 0),
            ("DGRAD(chunk=0, microbatch=0)", "a forward comes before its"),
        ),
        (
            "zero_bubble", 1, act(ActionKind.SEND_BACKWARD, 1), act(INPUT, 1),
            ("SEND_BACKWARD(chunk=0, microbatch=1)", "sent after it is computed"),
        ),
        (
            "zero_bubble", 1, act(ActionKind.RECV_BACKWARD, 1), act(INPUT, 1),
            ("DGRAD(chunk=0, microbatch=1)", "posted before its consumer"),
        ),
        (
            "zero_bubble", 0, REDUCE, act(WEIGHT, 4),
            ("REDUCE(chunk=0): comes before WGRAD(chunk=0, microbatch=4)",),
        ),
    ],
)  # fmt: skip
def test_swapped_actions_are_reported(
    name: str, stage: int, action: Action, other: Action, reported: tuple[str, ...]
) -> None:
    broken = swapped(SCHEDULES[name], stage, action, other)
    expect_one_problem(broken, f"stage {stage}", *reported)


@pytest.mark.parametrize(
    "foreign", [act(FORWARD, 4), act(BACKWARD, 0, chunk=1), act(ActionKind.RECV_FORWARD, 0), act(ActionKind.GATHER, 0)]
)
def test_foreign_action_is_reported(schedule: Schedule, foreign: Action) -> None:
    broken = with_stage(schedule, 0, [*schedule.stages[0], foreign])
    where = f"stage 0, position {len(schedule.stages[0])}, {foreign}"
    expect_one_problem(broken, f"{where}: this stage has no such action in this schedule")


def test_whole_backward_among_dgrads_is_reported(split: Schedule) -> None:
    broken = with_stage(split, 1, [*split.stages[1], act(BACKWARD, 2)])
    expect_one_problem(broken, f"{act(BACKWARD, 2)}: this stage has no such action in this schedule")
    whole = build_schedule("1f1b", 2, 1, 4)
    halved = with_stage(whole, 0, [*whole.stages[0], act(WEIGHT, 2)])
    expect_one_problem(halved, "stage 1: WGRAD(chunk=0, microbatch=2) is missing")


def test_activations_are_held_until_their_wgrad(split: Schedule) -> None:
    order = [action for action in split.stages[2] if action.kind is not WEIGHT]
    weights = [act(WEIGHT, microbatch) for microbatch in range(5)]
    hoarding = with_stage(split, 2, [*order[:-1], *weights, order[-1]])
    expect_one_problem(hoarding, "stage 2: 5 activations are held at once; schedule 'zero_bubble' may hold 3")


def test_wgrad_delays_a_later_message(split: Schedule) -> None:
    # The message for which the next stage waits is sent before it, not after.
    late = swapped(split, 1, act(ActionKind.SEND_BACKWARD, 4), act(WEIGHT, 3))
    assert check_schedule(late) == []
    assert execute(late).slots[0][-1] > execute(split).slots[0][-1]


def test_evaluation_has_no_reduce() -> None:
    schedule = forward_only(ChunkPlacement(2, 1), 2)
    broken = with_stage(schedule, 1, [*schedule.stages[1], Action(ActionKind.REDUCE, 0, -1)])
    expect_one_problem(broken, "REDUCE(chunk=0): this stage has no such action")


def test_crossed_messages_of_a_channel_are_reported(schedule: Schedule) -> None:
    one, other = act(ActionKind.RECV_FORWARD, 1), act(ActionKind.RECV_FORWARD, 2)
    problem = expect_one_problem(
        swapped(schedule, 1, one, other), "forward channel 0->1, message 1: sent by stage 0, position"
    )
    assert "SEND_FORWARD(chunk=0, microbatch=1), received by stage 1, position" in problem
    assert problem.endswith("RECV_FORWARD(chunk=0, microbatch=2)")


def test_too_many_receives_ahead_are_reported() -> None:
    orders = interleaved(ChunkPlacement(4, 2), 8)
    schedule = replace(
        build_schedule("interleaved", 4, 2, 8), stages=lower(orders, ChunkPlacement(4, 2), 8, receives_ahead=3)
    )
    problems = check_schedule(schedule)
    assert problems
    assert all("3 receives are posted and not consumed; at most 2 may be" in problem for problem in problems)
    assert check_schedule(schedule, pending_receives_bound=4) == []


@pytest.mark.parametrize(("name", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_schedules_without_receives_ahead_are_right(name: str, num_chunks: int) -> None:
    for pp_size in (2, 3, 4):
        for num_microbatches in (4, 5, 7, 8):
            schedule = build_schedule(name, pp_size, num_chunks, num_microbatches)
            orders = [
                [action for action in actions if action.kind in (FORWARD, BACKWARD)] for actions in schedule.stages
            ]
            late = replace(schedule, stages=lower(orders, schedule.placement, num_microbatches, receives_ahead=0))
            assert check_schedule(late, pending_receives_bound=1) == []


def test_too_many_activations_are_reported() -> None:
    hungry = replace(build_schedule("gpipe", 2, 1, 8), name="1f1b")
    expect_one_problem(hungry, "stage 0: 8 activations are held at once; schedule '1f1b' may hold 2")
    expect_one_problem(hungry, "stage 1: 8 activations are held at once; schedule '1f1b' may hold 1")
    assert check_schedule(replace(hungry, name="experiment")) == []


def test_deadlock_of_compute_orders_is_reported() -> None:
    orders = [
        [act(FORWARD, 0), act(BACKWARD, 0), act(FORWARD, 1), act(BACKWARD, 1)],
        [act(FORWARD, 0), act(FORWARD, 1), act(BACKWARD, 0), act(BACKWARD, 1)],
    ]
    schedule = Schedule("experiment", ChunkPlacement(2, 1), 2, lower(orders, ChunkPlacement(2, 1), 2))
    problems = check_schedule(schedule)
    assert len(problems) == 2
    backward, forward = (
        actions.index(wait) for actions, wait in zip(schedule.stages, (orders[0][1], orders[1][1]), strict=True)
    )
    assert problems[0] == (
        f"deadlock: stage 0, position {backward}, BACKWARD(chunk=0, microbatch=0): waits for message 0 of the "
        f"backward channel 1->0, but stage 1 itself stops at position {forward}"
    )
    assert problems[1].startswith(f"deadlock: stage 1, position {forward}, FORWARD(chunk=0, microbatch=1): waits for")


def test_a_larger_group_after_a_smaller_one_is_wrong() -> None:
    # Why interleaved.py puts the largest group first. Here the warm-up is that of the first group, as there.
    groups = (range(3), range(3, 7))
    forwards = [act(FORWARD, microbatch, chunk) for group in groups for chunk in (0, 1) for microbatch in group]
    backwards = [act(BACKWARD, microbatch, chunk) for group in groups for chunk in (1, 0) for microbatch in group]
    orders = [alternate(forwards, backwards, 2 * (2 - stage) + 3) for stage in range(3)]
    problems = check_schedule(Schedule("experiment", ChunkPlacement(3, 2), 7, lower(orders, ChunkPlacement(3, 2), 7)))
    assert problems
    assert all("a forward comes before its backward" in problem for problem in problems)


def test_wrong_number_of_action_lists_is_reported(schedule: Schedule) -> None:
    assert check_schedule(replace(schedule, placement=ChunkPlacement(3, 1))) == [
        "schedule '1f1b' has 2 action lists for pp_size=3"
    ]


def test_infeasible_sizes_of_a_schedule_are_reported(schedule: Schedule) -> None:
    expect_one_problem(
        replace(schedule, placement=ChunkPlacement(2, 2)), 'parallel.num_chunks=2 needs parallel.schedule="interleaved"'
    )


def can_finish(schedule: Schedule, awaits_sends: bool = False) -> bool:
    """The oracle: pair messages by position in their channel and look for a cycle with the replay engine."""
    streams: list[int] = []
    edges: list[tuple[int, int]] = []
    # Channel -> sends, receives, consumers of the receives.
    ends: dict[tuple[bool, int], tuple[list[int], list[int], list[int]]] = defaultdict(lambda: ([], [], []))
    for stage, actions in enumerate(schedule.stages):
        ids = {action: len(streams) + position for position, action in enumerate(actions)}
        streams += [stage] * len(actions)
        for action in actions:
            match action.kind:
                case ActionKind.SEND_FORWARD | ActionKind.SEND_BACKWARD:
                    ends[action.kind is ActionKind.SEND_FORWARD, stage][0].append(ids[action])
                case ActionKind.RECV_FORWARD | ActionKind.RECV_BACKWARD:
                    is_forward = action.kind is ActionKind.RECV_FORWARD
                    _, receives, consumers = ends[is_forward, (stage + (-1 if is_forward else 1)) % schedule.pp_size]
                    receives.append(ids[action])
                    consumers.append(ids[replace(action, kind=FORWARD if is_forward else BACKWARD)])
    for sends, receives, consumers in ends.values():
        edges += zip(sends, consumers, strict=True)
        if awaits_sends:
            edges += zip(receives, sends, strict=True)
    try:
        graph_of_streams(streams, edges)
    except TopologyError:
        return False
    return True


def test_interleaved_schedule_with_blocking_sends_deadlocks() -> None:
    # Why the runtime without overlap posts receives late instead: that is receives_ahead=0, proved above.
    assert can_finish(build_schedule("1f1b", 4, 1, 8), awaits_sends=True)
    assert can_finish(build_schedule("interleaved", 2, 2, 4))
    assert not can_finish(build_schedule("interleaved", 2, 2, 4), awaits_sends=True)


def test_deadlock_is_found_exactly_at_dependency_cycles() -> None:
    rng = random.Random(0)
    verdicts: list[bool] = []
    for _ in range(75):
        pp_size, num_chunks, num_microbatches = rng.choice([(2, 1, 4), (2, 2, 3), (3, 1, 4), (3, 2, 4), (4, 2, 5)])
        placement = ChunkPlacement(pp_size, num_chunks)
        orders = interleaved(placement, num_microbatches)
        for _ in range(rng.randrange(1, 40)):
            order = rng.choice(orders)
            position = rng.randrange(len(order) - 1)
            order[position : position + 2] = reversed(order[position : position + 2])
        schedule = Schedule("experiment", placement, num_microbatches, lower(orders, placement, num_microbatches))
        is_deadlocked = any(problem.startswith("deadlock") for problem in check_schedule(schedule))
        assert is_deadlocked == (not can_finish(schedule))
        verdicts.append(is_deadlocked)
    assert 10 < sum(verdicts) < 65
