"""The checker proves every schedule valid for all pp_size <= 8, num_chunks <= 4, num_microbatches <= 32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from megatrain.contracts.errors import TopologyError
from megatrain.schedule import (
    SCHEDULE_NAMES,
    Action,
    ActionKind,
    ChunkPlacement,
    build_schedule,
    check_schedule,
    forward_only,
    in_flight_bound,
    infeasibility,
    peak_in_flight,
)
from megatrain.schedule.interleaved import group_sizes

COMPUTES = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.DGRAD, ActionKind.WGRAD)
RECEIVE_OF = {
    ActionKind.FORWARD: ActionKind.RECV_FORWARD,
    ActionKind.BACKWARD: ActionKind.RECV_BACKWARD,
    ActionKind.DGRAD: ActionKind.RECV_BACKWARD,
}
SEND_OF = {
    ActionKind.FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.BACKWARD: ActionKind.SEND_BACKWARD,
    ActionKind.DGRAD: ActionKind.SEND_BACKWARD,
}


def feasible_sizes(name: str, pp_size: int, most: int = 32) -> Iterator[tuple[int, int]]:
    for num_chunks in range(1, 5):
        for num_microbatches in range(1, most + 1):
            if infeasibility(name, pp_size, num_chunks, num_microbatches) is None:
                yield num_chunks, num_microbatches


@pytest.mark.slow(kept=["zero_bubble-1", "1f1b-1", "gpipe-1", "zero_bubble-3", "gpipe-4", "gpipe-3"])
@pytest.mark.parametrize("pp_size", range(1, 9))
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_schedule_is_right_and_its_memory_bound_is_reached(name: str, pp_size: int) -> None:
    # With more micro-batches than these, the steady state is longer and otherwise the same.
    for num_chunks, num_microbatches in feasible_sizes(name, pp_size, most=2 * pp_size + 3):
        schedule = build_schedule(name, pp_size, num_chunks, num_microbatches)
        assert check_schedule(schedule) == []
        assert peak_in_flight(schedule) == in_flight_bound(name, pp_size, num_chunks, num_microbatches)


@pytest.mark.slow(kept=["1", "4", "5", "2"])
@pytest.mark.parametrize("pp_size", range(1, 9))
def test_forward_only_is_right_and_holds_nothing(pp_size: int) -> None:
    for num_chunks in range(1, 5):
        for num_microbatches in (1, 2, 3, 7, 8, 9, 17, 32):
            schedule = forward_only(ChunkPlacement(pp_size, num_chunks), num_microbatches)
            assert check_schedule(schedule) == []
            assert peak_in_flight(schedule) == (0,) * pp_size
            kinds = {action.kind for actions in schedule.stages for action in actions}
            assert not kinds & {ActionKind.BACKWARD, ActionKind.SEND_BACKWARD, ActionKind.REDUCE}


def test_every_pipeline_with_enough_microbatches_is_feasible() -> None:
    for pp_size in range(1, 9):
        for name in ("gpipe", "1f1b"):
            assert list(feasible_sizes(name, pp_size)) == [(1, m) for m in range(1, 33)]
        expected = [(c, m) for c in range(2, 5) for m in range(pp_size, 33)]
        assert list(feasible_sizes("interleaved", pp_size)) == expected
        expected = [(1, m) for m in range(pp_size, 33)] if pp_size > 1 else []
        assert list(feasible_sizes("zero_bubble", pp_size)) == expected


def exchanges_of_replicas(actions: Sequence[Action]) -> list[Action]:
    """Return a stage's exchanges with other replicas, in order: gathers, reductions, and the last backwards, during
    which reductions of buckets may start."""
    last = {action.chunk: action for action in actions if action.kind in (ActionKind.BACKWARD, ActionKind.WGRAD)}
    return [
        replace(action, microbatch=-1)
        for action in actions
        if action.kind in (ActionKind.GATHER, ActionKind.REDUCE) or action in last.values()
    ]


@pytest.mark.parametrize("has_aligned_reductions", [False, True])
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_replicas_meet_in_one_order_for_any_microbatches(name: str, has_aligned_reductions: bool) -> None:
    """Replicas with unequal numbers of micro-batches start their collectives in the same order."""
    for pp_size in range(1, 6):
        orders: dict[tuple[int, int], list[Action]] = {}
        for num_chunks, num_microbatches in feasible_sizes(name, pp_size, most=2 * pp_size + 3):
            schedule = build_schedule(
                name, pp_size, num_chunks, num_microbatches, has_aligned_reductions=has_aligned_reductions
            )
            for stage, actions in enumerate(schedule.stages):
                found = exchanges_of_replicas(actions)
                if has_aligned_reductions:  # Then no reduction starts before its action.
                    found = [action for action in found if action.kind in (ActionKind.GATHER, ActionKind.REDUCE)]
                assert found == orders.setdefault((num_chunks, stage), found), (pp_size, num_chunks, num_microbatches)


@pytest.mark.slow
def test_the_largest_published_shape_is_right() -> None:
    # MegaScale's 530B run: pp_size 35, 3 chunks a stage.
    assert check_schedule(build_schedule("interleaved", 35, 3, 280)) == []


def test_single_stage_neither_sends_nor_receives() -> None:
    kinds = [action.kind for action in build_schedule("1f1b", 1, 1, 2).stages[0]]
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    assert kinds == [ActionKind.GATHER, forward, backward, forward, backward, ActionKind.REDUCE]


@pytest.mark.parametrize(
    ("name", "num_chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1)],
)
def test_receives_are_posted_one_compute_ahead(name: str, num_chunks: int) -> None:
    schedule = build_schedule(name, 4, num_chunks, 9)
    for actions in schedule.stages:
        positions = {action: position for position, action in enumerate(actions)}
        computes = [action for action in actions if action.kind in COMPUTES]
        for slot, compute in enumerate(computes):
            if compute.kind is ActionKind.WGRAD:
                continue
            receive = positions.get(Action(RECEIVE_OF[compute.kind], compute.chunk, compute.microbatch))
            if receive is not None and slot:
                assert receive < positions[computes[slot - 1]]
                assert slot == 1 or receive > positions[computes[slot - 2]]
            send = positions.get(Action(SEND_OF[compute.kind], compute.chunk, compute.microbatch))
            assert send is None or send == positions[compute] + 1


def test_initial_gathers_need_no_batch() -> None:
    for schedule in (build_schedule("interleaved", 4, 3, 8), build_schedule("1f1b", 4, 1, 8)):
        for stage in range(4):
            initial = schedule.initial_gathers(stage)
            assert [(one.kind, one.chunk) for one in initial] == [
                (ActionKind.GATHER, chunk) for chunk in range(min(2, schedule.num_chunks))
            ]


def test_gathers_run_one_chunk_ahead_and_reduces_come_last() -> None:
    schedule = build_schedule("interleaved", 4, 3, 8)
    for actions in schedule.stages:
        positions = {action: position for position, action in enumerate(actions)}
        first, second, third = (Action(ActionKind.GATHER, chunk, -1) for chunk in range(3))
        assert actions[:2] == (first, second)
        assert actions[2].kind is not ActionKind.GATHER
        assert positions[third] == positions[Action(ActionKind.FORWARD, 1, 0)] - 1
        for chunk in range(3):
            reduce = positions[Action(ActionKind.REDUCE, chunk, -1)]
            last_backward = positions[Action(ActionKind.BACKWARD, chunk, 7)]
            has_send = Action(ActionKind.SEND_BACKWARD, chunk, 7) in positions
            assert reduce == last_backward + 1 + has_send


def test_zero_bubble_delays_wgrads_by_the_stage() -> None:
    split, whole = build_schedule("zero_bubble", 4, 1, 9), build_schedule("1f1b", 4, 1, 9)
    for stage, (actions, of_whole) in enumerate(zip(split.stages, whole.stages, strict=True)):
        # forwards and dgrads in the order of 1f1b, and gradients reduced when all wgrads are done
        rest = [(action.kind, action.microbatch) for action in actions if action.kind is not ActionKind.WGRAD]
        renamed = {ActionKind.BACKWARD: ActionKind.DGRAD}
        expected = [(renamed.get(one.kind, one.kind), one.microbatch) for one in of_whole]
        computes = [pair for pair in rest if pair[0] in COMPUTES]
        assert computes == [pair for pair in expected if pair[0] in COMPUTES]
        assert actions[-2:] == (Action(ActionKind.WGRAD, 0, 8), Action(ActionKind.REDUCE, 0, -1))
        # wgrads in the order of the micro-batches, each deferred by as many computes as there are stages before this
        # one
        done = [action for action in actions if action.kind in (ActionKind.DGRAD, ActionKind.WGRAD)]
        weights = [position for position, one in enumerate(done) if one.kind is ActionKind.WGRAD]
        assert [done[position].microbatch for position in weights] == list(range(9))
        inputs_before = [done[:position].count(Action(ActionKind.DGRAD, 0, n)) for n, position in enumerate(weights)]
        assert inputs_before == [1] * 9
        late = [sum(one.kind is ActionKind.DGRAD for one in done[:position]) - 1 for position in weights]
        assert late == [min(microbatch + stage, 8) for microbatch in range(9)]


def test_warmup_depth_is_that_of_the_papers() -> None:
    def num_warmup(name: str, num_chunks: int, num_microbatches: int) -> list[int]:
        schedule = build_schedule(name, 4, num_chunks, num_microbatches)
        orders = [[action.kind for action in actions if action.kind in COMPUTES] for actions in schedule.stages]
        return [order.index(ActionKind.BACKWARD) - 1 for order in orders]

    assert num_warmup("1f1b", 1, 8) == [3, 2, 1, 0]
    assert num_warmup("interleaved", 2, 8) == [10, 8, 6, 4]
    assert num_warmup("interleaved", 3, 8) == [14, 12, 10, 8]


def test_groups_are_nearly_equal_and_the_largest_is_first() -> None:
    assert group_sizes(4, 8) == [4, 4]
    assert group_sizes(4, 10) == [5, 5]
    assert group_sizes(4, 11) == [6, 5]
    assert group_sizes(4, 7) == [7]
    assert group_sizes(3, 14) == [4, 4, 3, 3]
    assert group_sizes(4, 2) == [2]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("zigzag", 2, 1, 4), 'parallel.schedule="zigzag" is not one of gpipe, 1f1b, interleaved, zero_bubble'),
        (("1f1b", 0, 1, 4), "parallel.pp_size=0 must be at least 1"),
        (("1f1b", 2, 0, 4), "parallel.num_chunks=0 must be at least 1"),
        (("gpipe", 2, 1, 0), "num_microbatches=0 must be at least 1"),
        (("1f1b", 2, 2, 4), 'parallel.num_chunks=2 needs parallel.schedule="interleaved", found "1f1b"; use'),
        (("interleaved", 4, 2, 3), 'num_microbatches=3 .* must be at least parallel.pp_size=4 .* use schedule="1f1b"'),
        (("zero_bubble", 4, 1, 3), 'num_microbatches=3 .* must be at least parallel.pp_size=4 .* use schedule="1f1b"'),
        (("zero_bubble", 1, 1, 4), 'parallel.pp_size=1 has none; use schedule="1f1b" or pp_size=2'),
        (("zero_bubble", 2, 2, 4), 'parallel.num_chunks=2 needs parallel.schedule="interleaved", found "zero_bubble"'),
    ],
)
def test_impossible_pipelines_are_refused_with_a_hint(sizes: tuple[str, int, int, int], message: str) -> None:
    problem = infeasibility(*sizes)
    assert problem is not None
    with pytest.raises(TopologyError, match=message) as caught:
        build_schedule(*sizes)
    assert str(caught.value) == problem


def test_impossible_forward_pipelines_are_refused() -> None:
    for pp_size, num_chunks, num_microbatches in ((0, 1, 1), (2, 0, 1), (2, 1, 0)):
        with pytest.raises(TopologyError, match=f"no forward pipeline of pp_size={pp_size}, num_chunks={num_chunks}"):
            forward_only(ChunkPlacement(pp_size, num_chunks), num_microbatches)


def test_equal_requests_share_one_schedule() -> None:
    assert build_schedule("1f1b", 4, 1, 8) is build_schedule("1f1b", 4, 1, 8)
