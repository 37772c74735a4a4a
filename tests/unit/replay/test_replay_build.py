"""What a graph must not contain: cycles, and arrays that do not fit together."""

from __future__ import annotations

import random
from graphlib import CycleError, TopologicalSorter
from typing import Any

import pytest

from megatrain.contracts.errors import TopologyError
from megatrain.replay import build_graph


def test_cycle_names_its_operations_and_no_others() -> None:
    names = ["load", "compute", "send", "recv", "after"]
    with pytest.raises(TopologyError) as caught:
        build_graph([-1] * 5, [(0, 1), (1, 2), (2, 3), (3, 1), (3, 4)], describe=names.__getitem__)
    message = str(caught.value)
    assert message.startswith("the dependencies form a cycle: ")
    for link in ("compute waits for recv", "recv waits for send", "send waits for compute"):
        assert link in message
    assert "load" not in message
    assert "after" not in message


def test_cycle_through_a_stream() -> None:
    with pytest.raises(TopologyError, match="operation 1 waits for operation 0; operation 0 waits for operation 1"):
        build_graph([3, 3], [(1, 0)])


def test_cycle_through_a_group_says_that_two_start_together() -> None:
    # 1 follows 0, 2 follows 1, but 0 and 2 are to start together.
    with pytest.raises(TopologyError, match=r"operation (0 starts together with operation 2|2 .* operation 0)"):
        build_graph([-1] * 3, [(0, 1), (1, 2)], start_groups=[5, -1, 5])


def test_member_that_waits_for_its_own_group_is_a_cycle() -> None:
    with pytest.raises(TopologyError, match="operation 1 waits for operation 0"):
        build_graph([0, 0], start_groups=[1, 1])


def test_long_cycle_is_abridged() -> None:
    edges = [(operation, (operation + 1) % 1000) for operation in range(1000)]
    with pytest.raises(TopologyError, match=r"\.\.\. \(988 more\)") as caught:
        build_graph([-1] * 1000, edges)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("seed", range(40))
def test_finds_a_cycle_exactly_when_the_standard_library_does(seed: int) -> None:
    rng = random.Random(seed)
    edges = [(rng.randrange(30), rng.randrange(30)) for _ in range(rng.randrange(5, 45))]
    needs: dict[int, set[int]] = {operation: set() for operation in range(30)}
    for a, b in edges:
        needs[b].add(a)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError:
        with pytest.raises(TopologyError, match="cycle"):
            build_graph([-1] * 30, edges)
    else:
        assert build_graph([-1] * 30, edges).num_operations == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"streams": [0, 0], "edges": [(0, 2)]}, "edges name operations outside 0 to 1"),
        ({"streams": [0, 0], "edges": [(-1, 0)]}, "edges name operations outside 0 to 1"),
        ({"streams": [0, 0], "edges": [0, 1]}, r"edges has shape \(2,\); expected \[E, 2\]"),
        ({"streams": [0.0, 0.0]}, "streams must be integers, found float64"),
        ({"streams": [[0, 0]]}, r"streams has shape \(1, 2\); expected \[N\]"),
        ({"streams": [0, 0], "start_groups": [1]}, "start_groups has 1 entries for 2 operations"),
        ({"streams": [0, 0], "delays": [1]}, r"delays has shape \(1,\); expected \[0\]"),
        ({"streams": [0, 0], "edges": [(0, 1)], "delays": [-1]}, "delays must be numbers of at least 0"),
        ({"streams": [0, 0], "edges": [(0, 1)], "delays": [float("nan")]}, "delays must be numbers of at least 0"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_graph(**arguments)
