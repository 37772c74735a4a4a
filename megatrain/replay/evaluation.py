"""Evaluate a graph: the times of all operations, for one scenario of durations or many at once."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from megatrain.replay.csr import Numbers
from megatrain.replay.graph import Graph

_LANES_AT_ONCE = 8
"""Scenarios that are evaluated together: 8 values of 8 bytes fill a cache line, so a predecessor costs one memory
access for all of them."""


class Times(NamedTuple):
    """When each operation starts and ends, in the shape of the durations. The first operations start at time 0."""

    start: Numbers
    end: Numbers


def evaluate(graph: Graph, durations: ArrayLike) -> Times:
    """Return the earliest times at which all operations can run.

    Shapes: durations [..., num_operations]; leading dimensions are scenarios.
    Units: those of the durations and delays. Integers give exact integers.
    Raises: ValueError for a wrong shape, and for durations that are negative or not a number.
    """
    given = np.asarray(durations)
    if given.ndim < 1 or given.shape[-1] != graph.num_operations:
        raise ValueError(f"durations has shape {given.shape}; expected [..., {graph.num_operations}]")
    if not (given >= 0).all():
        raise ValueError("durations must be numbers of at least 0")
    is_exact = np.issubdtype(given.dtype, np.integer) and np.issubdtype(graph.delays.dtype, np.integer)
    scenarios = given.reshape(prod(given.shape[:-1]), graph.num_operations)
    dtype = np.int64 if is_exact else np.float64
    start, end = np.empty(scenarios.shape, dtype=dtype), np.empty(scenarios.shape, dtype=dtype)
    for first in range(0, len(scenarios), _LANES_AT_ONCE):
        lanes = slice(first, first + _LANES_AT_ONCE)
        start_lanes, end_lanes = _evaluate_lanes(graph, scenarios[lanes, graph.order].T.astype(dtype, order="C"))
        start[lanes, graph.order] = start_lanes.T
        end[lanes, graph.order] = end_lanes.T
    return Times(start.reshape(given.shape), end.reshape(given.shape))


def _evaluate_lanes(graph: Graph, durations: Numbers) -> tuple[Numbers, Numbers]:
    """Evaluate durations [position, lane] level by level."""
    start = np.zeros_like(durations)
    end = np.empty_like(durations)
    widest = max((level.last_node - level.first_node for level in graph.levels), default=0)
    buffer = np.empty((widest, durations.shape[1]), dtype=durations.dtype)
    ready = np.empty_like(buffer)
    has_groups = len(graph.node_of_position) > 0
    for level in graph.levels:
        operations = slice(level.first_operation, level.last_operation)
        if level.slots:
            num_nodes = level.last_node - level.first_node
            node_start = ready[:num_nodes] if has_groups else start[operations]
            for slot, (begin, count) in enumerate(level.slots):
                into = node_start if slot == 0 else buffer[:count]
                # mode="clip" lets take write directly into its output; positions are valid by construction.
                np.take(end, graph.predecessors[begin : begin + count], axis=0, out=into, mode="clip")
                if len(graph.delays):
                    into += graph.delays[begin : begin + count, np.newaxis]
                if slot:
                    np.maximum(node_start[:count], into, out=node_start[:count])
            if level.last_wide > level.first_wide:
                _reduce_wide(graph, level.first_wide, level.last_wide, end, node_start)
            if has_groups:
                nodes = graph.node_of_position[operations] - level.first_node
                np.take(node_start, nodes, axis=0, out=start[operations], mode="clip")
        np.add(start[operations], durations[operations], out=end[operations])
    return start, end


def _reduce_wide(graph: Graph, first_wide: int, last_wide: int, end: Numbers, node_start: Numbers) -> None:
    """Apply the predecessors beyond the slots, for the nodes that have more than NUM_SLOTS."""
    offsets = graph.wide_offsets[first_wide : last_wide + 1]
    edges = slice(int(offsets[0]), int(offsets[-1]))
    ends = end[graph.predecessors[edges]]
    if len(graph.delays):
        ends += graph.delays[edges, np.newaxis]
    latest = np.maximum.reduceat(ends, offsets[:-1] - offsets[0], axis=0)
    np.maximum(node_start[: last_wide - first_wide], latest, out=node_start[: last_wide - first_wide])
