"""Replicas against the engine for one graph, to which the same operations are given once for each replica."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatrain.contracts.errors import TopologyError
from megatrain.replay import build_graph, build_replica_graph, evaluate, evaluate_replicas

NUM_OPERATIONS, NUM_REPLICAS, NUM_COLUMNS = 60, 3, 4


def random_pipeline(seed: int) -> tuple[list[tuple[int, int]], list[int], list[bool]]:
    """Return edges, start groups and which operations are shared; a group's members do not wait for each other."""
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


def expanded_ends(edges, groups, is_shared, durations, delays):
    """Return the ends by the other engine: every replica's operations are its own, shared ones start together.

    A delay becomes an operation of its own before the one that is late.
    """
    num = NUM_OPERATIONS
    shared_groups = {groups[operation] for operation in range(num) if is_shared[operation] and groups[operation] >= 0}
    all_edges, all_groups = [], []
    for replica in range(NUM_REPLICAS):
        first = replica * 2 * num
        all_edges += [(first + 2 * a + 1, first + 2 * b) for a, b in edges]
        all_edges += [(first + 2 * operation, first + 2 * operation + 1) for operation in range(num)]
        for operation in range(num):
            label = groups[operation] if groups[operation] >= 0 else 1000 + operation
            is_common = is_shared[operation] or groups[operation] in shared_groups
            all_groups += [-1, label if is_common else (replica + 1) * 10_000 + label]
    graph = build_graph([-1] * len(all_groups), all_edges, start_groups=all_groups)
    both = np.stack([delays, durations], axis=1)  # [operation, delay or duration, replica, column]
    flat = both.transpose(3, 2, 0, 1).reshape(NUM_COLUMNS, -1)
    ends = evaluate(graph, flat).end.reshape(NUM_COLUMNS, NUM_REPLICAS, num, 2)
    return ends[:, :, :, 1].transpose(2, 1, 0)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("has_delays", [False, True])
def test_replicas_end_when_the_whole_graph_says_so(seed: int, has_delays: bool) -> None:
    edges, groups, is_shared = random_pipeline(seed)
    rng = np.random.default_rng(seed)
    durations = rng.integers(0, 50, (NUM_OPERATIONS, NUM_REPLICAS, NUM_COLUMNS)).astype(float)
    delays = rng.integers(0, 9, durations.shape) * (1.0 if has_delays else 0.0)
    graph = build_replica_graph(NUM_OPERATIONS, edges, start_groups=groups, is_shared=is_shared)

    late = delays.__getitem__ if has_delays else None
    found = evaluate_replicas(graph, NUM_REPLICAS, NUM_COLUMNS, durations.__getitem__, late)

    assert np.array_equal(found, expanded_ends(edges, groups, is_shared, durations, delays))


def test_numbers_and_rows_stand_for_all_replicas_and_columns() -> None:
    graph = build_replica_graph(2, [(0, 1)], start_groups=[-1, -1], is_shared=[False, True])
    row = np.array([[1.0], [5.0]])
    ends = evaluate_replicas(graph, 2, 3, lambda operation: row if operation == 0 else 2.0)
    assert ends[0].tolist() == [[1.0] * 3, [5.0] * 3]
    assert ends[1].tolist() == [[7.0] * 3] * 2


def test_negative_durations_are_clocks_that_disagree() -> None:
    graph = build_replica_graph(2, [(0, 1)], start_groups=[-1, -1], is_shared=[False, False])
    assert evaluate_replicas(graph, 1, 1, lambda operation: (3.0, -1.0)[operation])[1].item() == 2.0


def test_cycle_through_a_group_is_named() -> None:
    with pytest.raises(TopologyError, match=r"operation 0 starts together with operation 2|operation 2 .* operation 0"):
        build_replica_graph(3, [(0, 1), (1, 2)], start_groups=[4, -1, 4], is_shared=[False] * 3)
