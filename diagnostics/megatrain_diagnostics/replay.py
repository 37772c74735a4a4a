"""Computes when each operation of a dependency graph ends, from the durations of the operations.

Many replicas of one graph are computed at once: equal dependencies, different durations, some shared operations.
Data-parallel replicas and steps repeat the same graph, so it is compiled once, and an operation's times are one small
matrix [replica, column] that stays in the cache. A shared operation waits for all replicas of its column. Columns
(steps or scenarios) do not depend on each other. Durations are requested operation by operation, so that a scenario
need not copy millions of durations to change a few.

The graph is compiled to topological levels: the nodes of a level can run only after a node of the previous level. A
node is an operation, or a group of operations that start together. Edges are stored as compressed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatrain.contracts.errors import TopologyError

Index = NDArray[np.int64]

Matrix = NDArray[np.float64]
Durations = Callable[[int], Matrix | float]
"""Returns durations of an operation, in a shape that fits [replica, column]; negative ones are due to clock errors."""


class Rows(NamedTuple):
    """Row r is values[offsets[r] : offsets[r + 1]]."""

    offsets: Index
    values: Index


def group_by(keys: Index, values: Index, num_rows: int) -> Rows:
    """Return the values of each key as rows; the values of a key keep their order."""
    order = np.argsort(keys, kind="stable")
    return Rows(offsets_of(np.bincount(keys, minlength=num_rows)), values[order])


def offsets_of(counts: Index) -> Index:
    """Return the start of each of consecutive slices of these lengths, and the end of the last slice."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def concatenate(rows: Rows, selected: Index) -> Index:
    """Return the values of the selected rows, one row after the other."""
    begins = rows.offsets[selected]
    counts = rows.offsets[selected + 1] - begins
    indices: Index = np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    return rows.values[indices]


def topological_levels(num_nodes: int, sources: Index, targets: Index) -> Rows:
    """Return the nodes of each level; a node in no level is on a cycle or depends on one.

    `sources[i] -> targets[i]` are the edges, as nodes. A node's level is the length of the longest path to it.
    """
    successors = group_by(sources, targets, num_nodes)
    num_open = np.bincount(targets, minlength=num_nodes)
    is_first_seen = np.empty(num_nodes, dtype=np.int64)
    level = np.flatnonzero(num_open == 0)
    levels: list[Index] = []
    while len(level):
        levels.append(level)
        reached = concatenate(successors, level)
        np.subtract.at(num_open, reached, 1)
        ready = reached[num_open[reached] == 0]
        # A node reached by several edges of this level appears several times; keep the last one written.
        numbers = np.arange(len(ready))
        is_first_seen[ready] = numbers
        level = ready[is_first_seen[ready] == numbers]
    offsets = offsets_of(np.array([len(level) for level in levels], dtype=np.int64))
    return Rows(offsets, np.concatenate(levels) if levels else np.empty(0, dtype=np.int64))


def find_cycle(nodes_in_levels: Index, num_nodes: int, sources: Index, targets: Index) -> list[int]:
    """Return the indices of the edges of one cycle among the nodes that are in no level, in order of dependency."""
    is_stuck = np.ones(num_nodes, dtype=bool)
    is_stuck[nodes_in_levels] = False
    stuck_edges = np.flatnonzero(is_stuck[sources] & is_stuck[targets])
    # Every stuck node has a stuck predecessor, so a walk backwards must reach a node for the second time.
    edge_into = np.full(num_nodes, -1, dtype=np.int64)
    edge_into[targets[stuck_edges]] = stuck_edges
    node = int(targets[stuck_edges[0]])
    visited: dict[int, int] = {}
    walk: list[int] = []
    while node not in visited:
        visited[node] = len(walk)
        edge = int(edge_into[node])
        walk.append(edge)
        node = int(sources[edge])
    return walk[visited[node] :][::-1]


@dataclass(frozen=True, slots=True)
class Node:
    """Operations that start together, and the operations that each of them waits for."""

    operations: tuple[int, ...]
    waits: tuple[tuple[int, ...], ...]
    all_waits: tuple[int, ...]
    is_shared: bool


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaGraph:
    """One replica's operations: the nodes in an order in which they can be evaluated."""

    num_operations: int
    nodes: tuple[Node, ...]


def build_replica_graph(
    num_operations: int,
    edges: ArrayLike,
    *,
    start_groups: ArrayLike,
    is_shared: ArrayLike,
    describe: Callable[[int], str] = "operation {}".format,
) -> ReplicaGraph:
    """Compile the operations 0 to N - 1 of one replica.

    edges [E, 2]: (a, b): b starts after a has ended. start_groups [N]: operations of one group start together;
    -1 = in no group. is_shared [N]: the operation, and so its group, starts once it can start in every replica.
    describe: names an operation in messages.
    Raises: TopologyError naming the operations of a cycle.
    """
    pairs = np.unique(np.asarray(edges, dtype=np.int64).reshape(-1, 2), axis=0)
    node_of = _node_numbers(np.asarray(start_groups, dtype=np.int64))
    num_nodes = int(node_of.max()) + 1 if num_operations else 0
    before, after = pairs[:, 0], pairs[:, 1]
    sources, targets = node_of[before], node_of[after]
    levels = topological_levels(num_nodes, sources, targets)
    if len(levels.values) < num_nodes:
        cycle = find_cycle(levels.values, num_nodes, sources, targets)
        raise TopologyError(_describe_cycle(cycle, before, after, describe))
    members: list[list[int]] = [[] for _ in range(num_nodes)]
    for operation, node in enumerate(node_of.tolist()):
        members[node].append(operation)
    waits: list[list[int]] = [[] for _ in range(num_operations)]
    for earlier, later in pairs.tolist():
        waits[later].append(earlier)
    shared = np.asarray(is_shared, dtype=bool).tolist()
    nodes = tuple(
        Node(
            operations=tuple(members[node]),
            waits=tuple(tuple(waits[operation]) for operation in members[node]),
            all_waits=tuple(sorted({wait for operation in members[node] for wait in waits[operation]})),
            is_shared=any(shared[operation] for operation in members[node]),
        )
        for node in levels.values.tolist()
    )
    return ReplicaGraph(num_operations, nodes)


def evaluate_replicas(
    graph: ReplicaGraph, num_replicas: int, num_columns: int, durations: Durations, delays: Durations | None = None
) -> Matrix:
    """Return when each operation ends; the first operations can start at time 0.

    delays: the time from the end of an operation's dependencies until the operation is ready to start.
    Shapes: the result is [operation, replica, column].
    """
    end = np.empty((graph.num_operations, num_replicas, num_columns))
    buffer = np.empty((num_replicas, num_columns))
    for node in graph.nodes:
        if delays is None:
            start = _latest(end, node.all_waits, buffer)
        else:
            ready = [
                _latest(end, waits, buffer) + delays(operation)
                for operation, waits in zip(node.operations, node.waits, strict=True)
            ]
            start = ready[0] if len(ready) == 1 else np.maximum.reduce(np.broadcast_arrays(*ready))
        if node.is_shared and num_replicas > 1 and isinstance(start, np.ndarray) and start.ndim == 2:
            start = start.max(axis=0, keepdims=True)
        for operation in node.operations:
            np.add(start, durations(operation), out=end[operation])
    return end


def _latest(end: Matrix, waits: tuple[int, ...], buffer: Matrix) -> Matrix | float:
    """Return when all of `waits` have ended; the result may be `buffer`, or a view of `end`."""
    if not waits:
        return 0.0
    if len(waits) == 1:
        alone: Matrix = end[waits[0]]
        return alone
    np.maximum(end[waits[0]], end[waits[1]], out=buffer)
    for wait in waits[2:]:
        np.maximum(buffer, end[wait], out=buffer)
    return buffer


def _node_numbers(start_groups: Index) -> Index:
    """Return each operation's node: its own node, or the node of its start group."""
    is_grouped = start_groups >= 0
    labels, group_nodes = np.unique(start_groups[is_grouped], return_inverse=True)
    nodes = np.empty(len(start_groups), dtype=np.int64)
    nodes[is_grouped] = group_nodes
    nodes[~is_grouped] = np.arange(len(labels), len(labels) + np.count_nonzero(~is_grouped))
    return nodes


def _describe_cycle(cycle: list[int], before: Index, after: Index, describe: Callable[[int], str]) -> str:
    """Return a text that names the operations of a cycle; `cycle` has indices of the edges `before` -> `after`."""
    links = []
    for edge, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        waiting, next_source = int(after[edge]), int(before[following])
        links.append(f"{describe(waiting)} waits for {describe(int(before[edge]))}")
        if waiting != next_source:
            links.append(f"{describe(next_source)} starts together with {describe(waiting)}")
    shown = links[::-1] if len(links) <= 12 else [*links[:-7:-1], f"... ({len(links) - 12} more)", *links[5::-1]]
    return "the dependencies form a cycle: " + "; ".join(shown)
