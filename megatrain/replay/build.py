"""Build a dependency graph from flat arrays, and refuse a graph with a cycle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from megatrain.contracts.errors import TopologyError
from megatrain.replay.csr import Index, Numbers
from megatrain.replay.graph import Graph, compile_graph
from megatrain.replay.levels import find_cycle, topological_levels


def build_graph(
    streams: ArrayLike,
    edges: ArrayLike = (),
    *,
    delays: ArrayLike | None = None,
    start_groups: ArrayLike | None = None,
    describe: Callable[[int], str] = "operation {}".format,
) -> Graph:
    """Compile operations 0 to N - 1 and their dependencies.

    streams [N]: operations of one stream run one at a time, in the order of their ids; -1 = on no stream.
    edges [E, 2]: (a, b): b starts after a has ended. delays [E], not negative: how much later it starts.
    start_groups [N]: operations of one group start together, once all of them can start; -1 = in no group.
    describe: names an operation in the error message.
    Raises: TopologyError naming the operations of a cycle; ValueError for arrays that do not fit together.
    """
    stream_of = _index_array(streams, "streams", 1)
    num_operations = len(stream_of)
    edge_array = _index_array(edges, "edges", 2) if np.size(edges) else np.empty((0, 2), dtype=np.int64)
    if len(edge_array) and (edge_array.min() < 0 or edge_array.max() >= num_operations):
        raise ValueError(f"edges name operations outside 0 to {num_operations - 1}")
    delay_array = _delay_array(delays, len(edge_array))
    node_of = node_numbers(start_groups, num_operations)
    num_nodes = int(node_of.max()) + 1 if num_operations else 0

    before, after = _stream_edges(stream_of)
    if len(delay_array):
        delay_array = np.concatenate([np.zeros(len(before), dtype=delay_array.dtype), delay_array])
    before = np.concatenate([before, edge_array[:, 0]])
    after = np.concatenate([after, edge_array[:, 1]])
    sources, targets = node_of[before], node_of[after]
    levels = topological_levels(num_nodes, sources, targets)
    if len(levels.values) < num_nodes:
        cycle = find_cycle(levels.values, num_nodes, sources, targets)
        raise TopologyError(describe_cycle(cycle, before, after, describe))
    return compile_graph(node_of, levels, before, targets, delay_array)


def _index_array(values: ArrayLike, name: str, num_dims: int) -> Index:
    array = np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be integers, found {array.dtype}")
    if array.ndim != num_dims or (num_dims == 2 and array.shape[1] != 2):
        raise ValueError(f"{name} has shape {array.shape}; expected {'[E, 2]' if num_dims == 2 else '[N]'}")
    return array.astype(np.int64, copy=False)


def _delay_array(delays: ArrayLike | None, num_edges: int) -> Numbers:
    if delays is None:
        return np.empty(0, dtype=np.int64)
    array = np.asarray(delays)
    if array.shape != (num_edges,):
        raise ValueError(f"delays has shape {array.shape}; expected [{num_edges}], one for each edge")
    if not (array >= 0).all():
        raise ValueError("delays must be numbers of at least 0")
    return array.astype(np.int64 if np.issubdtype(array.dtype, np.integer) else np.float64)


def node_numbers(start_groups: ArrayLike | None, num_operations: int) -> Index:
    """Return each operation's node: its own node, or the node of its start group."""
    if start_groups is None:
        return np.arange(num_operations)
    groups = _index_array(start_groups, "start_groups", 1)
    if len(groups) != num_operations:
        raise ValueError(f"start_groups has {len(groups)} entries for {num_operations} operations")
    is_grouped = groups >= 0
    labels, group_nodes = np.unique(groups[is_grouped], return_inverse=True)
    nodes = np.empty(num_operations, dtype=np.int64)
    nodes[is_grouped] = group_nodes
    nodes[~is_grouped] = np.arange(len(labels), len(labels) + np.count_nonzero(~is_grouped))
    return nodes


def _stream_edges(stream_of: Index) -> tuple[Index, Index]:
    on_stream = np.flatnonzero(stream_of >= 0)
    by_stream = on_stream[np.argsort(stream_of[on_stream], kind="stable")]
    before, after = by_stream[:-1], by_stream[1:]
    is_same = stream_of[before] == stream_of[after]
    return before[is_same], after[is_same]


def describe_cycle(cycle: list[int], before: Index, after: Index, describe: Callable[[int], str]) -> str:
    """Return a text that names the operations of a cycle; `cycle` has indices of the edges `before` -> `after`."""
    links = []
    for edge, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        waiting, next_source = int(after[edge]), int(before[following])
        links.append(f"{describe(waiting)} waits for {describe(int(before[edge]))}")
        if waiting != next_source:
            links.append(f"{describe(next_source)} starts together with {describe(waiting)}")
    shown = links[::-1] if len(links) <= 12 else [*links[:-7:-1], f"... ({len(links) - 12} more)", *links[5::-1]]
    return "the dependencies form a cycle: " + "; ".join(shown)
