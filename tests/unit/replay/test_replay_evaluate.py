"""The engine against a few lines of plain Python on random graphs, and by hand on small ones."""

from __future__ import annotations

import random
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

import numpy as np
import pytest

from megatrain.replay import Graph, build_graph, evaluate


@dataclass(frozen=True)
class Case:
    streams: list[int]
    edges: list[tuple[int, int]]
    delays: list[int]
    groups: list[int]

    def build(self) -> Graph:
        return build_graph(self.streams, self.edges, delays=self.delays, start_groups=self.groups)


def random_case(seed: int, num_operations: int = 80) -> Case:
    """Make a graph without cycles whose ids are in no topological order, so that nothing works by luck."""
    rng = random.Random(seed)
    # Blocks in an order of time; those of several operations are groups that start together.
    blocks: list[list[int]] = []
    while (made := sum(map(len, blocks))) < num_operations:
        blocks.append(list(range(made, min(made + rng.choice((1, 1, 1, 2, 3, 12)), num_operations))))
    streams, groups = [-1] * num_operations, [-1] * num_operations
    edges: list[tuple[int, int]] = []
    for number, block in enumerate(blocks):
        free_streams = rng.sample(range(5), 5)
        for operation in block:
            if free_streams and rng.random() < 0.7:
                streams[operation] = free_streams.pop()
            groups[operation] = number if len(block) > 1 else -1
            for _ in range(rng.choice((0, 1, 1, 2, 14)) if block[0] else 0):
                edges.append((rng.randrange(block[0]), operation))
    ids = rng.sample(range(num_operations), num_operations)
    for stream in set(streams) - {-1}:
        members = [operation for operation in range(num_operations) if streams[operation] == stream]
        for member, new in zip(members, sorted(ids[member] for member in members), strict=True):
            ids[member] = new
    old = sorted(range(num_operations), key=ids.__getitem__)
    return Case(
        streams=[streams[operation] for operation in old],
        edges=[(ids[a], ids[b]) for a, b in edges],
        delays=[rng.choice((0, rng.randrange(20))) for _ in edges],
        groups=[groups[operation] for operation in old],
    )


def plain_times(case: Case, durations: list[Any]) -> tuple[list[Any], list[Any]]:
    """The definition, one operation at a time, in the order that the standard library finds."""
    operations = range(len(case.streams))
    waits: dict[int, list[tuple[int, int]]] = {operation: [] for operation in operations}
    for (a, b), delay in zip(case.edges, case.delays, strict=True):
        waits[b].append((a, delay))
    last_on: dict[int, int] = {}
    for operation, stream in enumerate(case.streams):
        if stream >= 0:
            if stream in last_on:
                waits[operation].append((last_on[stream], 0))
            last_on[stream] = operation
    together = {
        operation: [
            other for other in operations if other == operation or case.groups[other] == case.groups[operation] != -1
        ]
        for operation in operations
    }
    group_waits = {operation: [wait for other in together[operation] for wait in waits[other]] for operation in waits}
    start: list[Any] = [0] * len(operations)
    end: list[Any] = [0] * len(operations)
    for operation in TopologicalSorter(
        {operation: {a for a, _ in group_waits[operation]} for operation in operations}
    ).static_order():
        start[operation] = max((end[a] + delay for a, delay in group_waits[operation]), default=0)
        end[operation] = start[operation] + durations[operation]
    return start, end


@pytest.mark.parametrize("seed", range(30))
def test_random_graph_has_the_times_of_the_definition(seed: int) -> None:
    case = random_case(seed)
    durations = np.random.default_rng(seed).integers(0, 100, size=(3, len(case.streams)))
    times = evaluate(case.build(), durations)
    for lane, given in enumerate(durations.tolist()):
        start, end = plain_times(case, given)
        assert times.start[lane].tolist() == start
        assert times.end[lane].tolist() == end


def test_floats_are_added_in_the_order_of_the_definition() -> None:
    case = random_case(7)
    durations = np.random.default_rng(7).random(len(case.streams))
    times = evaluate(case.build(), durations)
    start, end = plain_times(case, durations.tolist())
    assert times.start.tolist() == start
    assert times.end.tolist() == end


def test_random_graphs_contain_what_they_should() -> None:
    cases = [random_case(seed) for seed in range(30)]
    sizes = [case.groups.count(group) for case in cases for group in set(case.groups) - {-1}]
    assert max(sizes) == 12
    assert any(a > b for case in cases for a, b in case.edges)
    assert max(max(map([b for _, b in case.edges].count, range(80))) for case in cases) > 8


def test_scenarios_keep_their_leading_dimensions_and_do_not_mix() -> None:
    case = random_case(3)
    graph = case.build()
    durations = np.random.default_rng(3).integers(0, 100, size=(7, 3, len(case.streams)))
    times = evaluate(graph, durations)
    assert times.start.shape == times.end.shape == durations.shape
    for index in np.ndindex(7, 3):
        alone = evaluate(graph, durations[index])
        assert np.array_equal(times.start[index], alone.start)
        assert np.array_equal(times.end[index], alone.end)


def test_no_scenario_gives_no_times() -> None:
    assert evaluate(build_graph([0, 0]), np.empty((0, 2))).end.shape == (0, 2)


def test_integers_are_exact_beyond_the_floats() -> None:
    times = evaluate(build_graph([0, 0]), np.array([2**53, 1]))
    assert times.end.dtype == np.int64
    assert times.end.tolist() == [2**53, 2**53 + 1]


def test_a_float_delay_makes_the_result_float() -> None:
    times = evaluate(build_graph([-1, -1], [(0, 1)], delays=[0.5]), [1, 1])
    assert times.end.tolist() == [1.0, 2.5]


def test_stream_runs_one_operation_at_a_time_in_order_of_id() -> None:
    assert evaluate(build_graph([4, -1, 4, 0, 4]), [1, 10, 2, 20, 3]).start.tolist() == [0, 0, 1, 0, 3]


def test_group_starts_when_its_last_member_can() -> None:
    #  0 -> 2, 1 -> 3; 2 and 3 start together; 4 follows 2.
    graph = build_graph([0, 1, 0, 1, 0], start_groups=[-1, -1, 9, 9, -1])
    times = evaluate(graph, [5, 8, 1, 2, 1])
    assert times.start.tolist() == [0, 0, 8, 8, 9]
    assert times.end.tolist() == [5, 8, 9, 10, 10]


@pytest.mark.parametrize("width", [8, 9, 200])
def test_an_operation_may_wait_for_any_number_of_others(width: int) -> None:
    graph = build_graph([-1] * (width + 1), [(operation, width) for operation in range(width)])
    for slowest in (0, width // 2, width - 1):
        durations = np.ones(width + 1, dtype=np.int64)
        durations[slowest] = 5
        assert evaluate(graph, durations).start[width] == 5


def test_empty_graph() -> None:
    times = evaluate(build_graph([]), np.empty((2, 0)))
    assert times.start.shape == (2, 0)


@pytest.mark.parametrize("durations", [[1.0], [[1.0], [2.0]], 1.0, [1.0, 2.0, 3.0]])
def test_wrong_shape_of_durations_is_refused(durations: Any) -> None:
    with pytest.raises(ValueError, match=r"durations has shape .*; expected \[\.\.\., 2\]"):
        evaluate(build_graph([0, 0]), durations)


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_durations_must_be_numbers_of_at_least_zero(bad: float) -> None:
    with pytest.raises(ValueError, match="durations must be numbers of at least 0"):
        evaluate(build_graph([0, 0]), [1.0, bad])
