"""The replay engine: random graphs against plain Python, and small ones by hand."""

from __future__ import annotations

import random
import re
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import Any

import numpy as np
import pytest

from megatrain.contracts.errors import TopologyError
from megatrain_diagnostics.replay import ReplicaGraph, build_replica_graph, evaluate_replicas

NUM_OPERATIONS, NUM_REPLICAS, NUM_COLUMNS = 60, 3, 4


def random_pipeline(seed: int) -> tuple[list[tuple[int, int]], list[int], list[bool]]:
    """Return edges, start groups and which operations are shared; members of a group do not wait for each other."""
    rng = random.Random(seed)
    groups, is_shared = [-1] * NUM_OPERATIONS, [False] * NUM_OPERATIONS
    edges, block_begin, group = [], 0, 0
    while block_begin < NUM_OPERATIONS:
        block_end = min(NUM_OPERATIONS, block_begin + rng.choice((1, 1, 2, 3)))
        for operation in range(block_begin, block_end):
            if block_end - block_begin > 1:
                groups[operation] = group
            is_shared[operation] = rng.random() < 0.15
            edges += [(rng.randrange(block_begin), operation) for _ in range(rng.choice((0, 1, 2, 4))) if block_begin]
        block_begin, group = block_end, group + 1
    return edges, groups, is_shared


def plain_ends(edges, groups, is_shared, durations, delays):
    """Return the ends by their definition, one operation at a time, in the order that the standard library finds."""
    operations = range(NUM_OPERATIONS)
    together = [
        [other for other in operations if other == operation or groups[other] == groups[operation] != -1]
        for operation in operations
    ]
    waits = [[a for a, b in edges if b == operation] for operation in operations]
    needs = {operation: {wait for other in together[operation] for wait in waits[other]} for operation in operations}
    end = np.zeros(durations.shape)
    for one in TopologicalSorter(needs).static_order():
        start = np.max([end[waits[other]].max(axis=0, initial=0.0) + delays[other] for other in together[one]], axis=0)
        if any(is_shared[other] for other in together[one]):
            start = start.max(axis=0, keepdims=True)
        end[one] = start + durations[one]
    return end


def test_replicas_end_as_in_plain_python() -> None:
    for seed, has_delays in product(range(10), (False, True)):
        edges, groups, is_shared = random_pipeline(seed)
        rng = np.random.default_rng(seed)
        durations = rng.integers(0, 50, (NUM_OPERATIONS, NUM_REPLICAS, NUM_COLUMNS)).astype(float)
        delays = rng.integers(0, 9, durations.shape) * (1.0 if has_delays else 0.0)
        graph = build_replica_graph(NUM_OPERATIONS, edges, start_groups=groups, is_shared=is_shared)

        late = delays.__getitem__ if has_delays else None
        found = evaluate_replicas(graph, NUM_REPLICAS, NUM_COLUMNS, durations.__getitem__, late)

        expected = plain_ends(edges, groups, is_shared, durations, delays)
        assert np.array_equal(found, expected), f"seed {seed}, {'with' if has_delays else 'without'} delays"


def test_numbers_and_rows_stand_for_all_replicas_and_columns() -> None:
    graph = build_replica_graph(2, [(0, 1)], start_groups=[-1, -1], is_shared=[False, True])
    row = np.array([[1.0], [5.0]])
    ends = evaluate_replicas(graph, 2, 3, lambda operation: row if operation == 0 else 2.0)
    assert ends[0].tolist() == [[1.0] * 3, [5.0] * 3]
    assert ends[1].tolist() == [[7.0] * 3] * 2


def test_negative_durations_of_disagreeing_clocks_are_kept() -> None:
    assert evaluate_replicas(graph_of(2, [(0, 1)]), 1, 1, (3.0, -1.0).__getitem__)[1].item() == 2.0


def graph_of(num_operations: int, edges: list[tuple[int, int]], **more: Any) -> ReplicaGraph:
    values = {"start_groups": [-1] * num_operations, "is_shared": [False] * num_operations, **more}
    return build_replica_graph(num_operations, edges, **values)


def test_group_starts_when_its_last_member_can() -> None:
    #  0 -> 2, 1 -> 3; 2 and 3 start together; 4 follows 2.
    graph = graph_of(5, [(0, 2), (1, 3), (2, 4)], start_groups=[-1, -1, 9, 9, -1])
    assert evaluate_replicas(graph, 1, 1, [5, 8, 1, 2, 1].__getitem__).ravel().tolist() == [5, 8, 9, 10, 10]


def test_an_operation_may_wait_for_any_number_of_others() -> None:
    width = 200
    graph = graph_of(width + 1, [(operation, width) for operation in range(width)])
    for slowest in (0, width // 2, width - 1):
        ends = evaluate_replicas(graph, 1, 1, lambda operation, slowest=slowest: 5.0 if operation == slowest else 1.0)
        assert ends[width].item() == 6.0


def test_empty_graph() -> None:
    assert evaluate_replicas(graph_of(0, []), 2, 3, lambda operation: 1.0).shape == (0, 2, 3)


def test_cycle_names_its_operations_and_no_others() -> None:
    names = ["load", "compute", "send", "recv", "after"]
    with pytest.raises(TopologyError) as caught:
        graph_of(5, [(0, 1), (1, 2), (2, 3), (3, 1), (3, 4)], describe=names.__getitem__)
    message = str(caught.value)
    assert message.startswith("the dependencies form a cycle: ")
    for link in ("compute waits for recv", "recv waits for send", "send waits for compute"):
        assert link in message
    assert "load" not in message
    assert "after" not in message


def test_cycle_through_a_group_is_named() -> None:
    with pytest.raises(TopologyError, match=r"operation 0 starts together with operation 2|operation 2 .* operation 0"):
        graph_of(3, [(0, 1), (1, 2)], start_groups=[4, -1, 4])
    with pytest.raises(TopologyError, match="operation 1 waits for operation 0"):
        graph_of(2, [(0, 1)], start_groups=[1, 1])


def test_long_cycle_is_abridged() -> None:
    edges = [(operation, (operation + 1) % 1000) for operation in range(1000)]
    with pytest.raises(TopologyError, match=r"\.\.\. \(988 more\)") as caught:
        graph_of(1000, edges)
    links = str(caught.value).removeprefix("the dependencies form a cycle: ").split("; ")
    named = [tuple(map(int, re.findall(r"operation (\d+)", link))) for link in links]
    first, after = named[0][0], named[7][0]
    assert named[:6] == [((first - i) % 1000, (first - i - 1) % 1000) for i in range(6)]
    assert named[7:] == [((after - i) % 1000, (after - i - 1) % 1000) for i in range(6)]
    assert named[-1][1] == first, "the last link leads to the first operation"


def problem_of(edges: list[tuple[int, int]]) -> str:
    """Return why a graph of 30 operations is refused, or ""."""
    try:
        assert graph_of(30, edges).num_operations == 30
    except TopologyError as error:
        return str(error)
    return ""


def has_cycle(edges: list[tuple[int, int]]) -> bool:
    """Return whether the standard library finds a cycle."""
    needs: dict[int, set[int]] = {operation: set() for operation in range(30)}
    for a, b in edges:
        needs[b].add(a)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError:
        return True
    return False


def test_cycles_are_those_that_the_standard_library_finds() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        edges = [(rng.randrange(30), rng.randrange(30)) for _ in range(rng.randrange(5, 45))]
        problem = problem_of(edges)
        assert ("cycle" in problem, problem != "") == (has_cycle(edges),) * 2, f"seed {seed}: {problem}"
