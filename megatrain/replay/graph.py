"""The compiled form of a dependency graph, laid out so that it can be evaluated many times at memory speed.

The one idea: operations are renumbered by topological level, and the predecessors of a level are stored as "slots".
Slot j has the j-th predecessor of every node that has one; nodes with more predecessors come first. So a level takes a
few whole-array maxima for any graph, and for one scenario or many at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatrain.replay.csr import Index, Numbers, Rows, concatenate, group_by, offsets_of

NUM_SLOTS = 8
"""The number of predecessors that take one whole-array maximum each. Nodes with more (wide collectives) are few and are
reduced separately."""


@dataclass(frozen=True, slots=True)
class Level:
    """The ranges of one level in the flat arrays of a Graph, as plain integers for a fast loop."""

    first_node: int
    last_node: int
    first_operation: int
    last_operation: int
    slots: tuple[tuple[int, int], ...]
    """(begin, count) in `predecessors` of each slot; slot j covers the first `count` nodes of the level."""
    first_wide: int
    last_wide: int
    """The rows of `wide_offsets` for this level's wide nodes, which are the level's first nodes."""


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A compiled graph. Positions count operations in level order: `order[position]` is the operation's id."""

    num_operations: int
    order: Index
    levels: tuple[Level, ...]
    predecessors: Index
    """Positions: first by level and slot, then the predecessors of wide nodes beyond NUM_SLOTS, by node."""
    delays: Numbers
    """One per predecessor, or empty if no edge has a delay."""
    wide_offsets: Index
    node_of_position: Index
    """Empty if every operation is its own node, that is, without start groups."""


class _Numbering(NamedTuple):
    """Nodes by index and operations by position, both in level order; within a level the nodes with most predecessors
    come first."""

    index_of_node: Index
    position_of_operation: Index
    order: Index
    node_of_position: Index
    operation_offsets: Index
    level_of_index: Index
    degree_of_index: Index


def compile_graph(node_of: Index, levels: Rows, before: Index, targets: Index, delays: Numbers) -> Graph:
    """Lay out a graph whose edges lead from operation `before[i]` to node `targets[i]`.

    `node_of` maps operations to nodes, `levels` has the nodes of each level, `delays` is empty or has one per edge.
    """
    numbering = _number(node_of, levels, np.bincount(targets, minlength=len(levels.values)))
    degrees, level_of_index = numbering.degree_of_index, numbering.level_of_index
    counts = np.zeros((len(levels.offsets) - 1, NUM_SLOTS + 1), dtype=np.int64)
    for slot in range(NUM_SLOTS + 1):
        counts[:, slot] = np.bincount(level_of_index[degrees > slot], minlength=len(counts))
    slot_begins = offsets_of(counts[:, :NUM_SLOTS].ravel())

    indices = numbering.index_of_node[targets]
    by_index = np.argsort(indices, kind="stable")
    destinations = _destinations(indices[by_index], numbering, levels.offsets, slot_begins)
    predecessors = np.empty(len(before), dtype=np.int64)
    predecessors[destinations] = numbering.position_of_operation[before[by_index]]
    slot_delays = np.empty_like(delays)
    if len(delays):
        slot_delays[destinations] = delays[by_index]
    return Graph(
        num_operations=len(node_of),
        order=numbering.order,
        levels=_level_table(levels.offsets, numbering.operation_offsets, counts, slot_begins),
        predecessors=predecessors,
        delays=slot_delays,
        wide_offsets=slot_begins[-1] + offsets_of(degrees[degrees > NUM_SLOTS] - NUM_SLOTS),
        node_of_position=numbering.node_of_position,
    )


def _number(node_of: Index, levels: Rows, in_degree: Index) -> _Numbering:
    num_nodes, num_operations = len(levels.values), len(node_of)
    level_of_index = np.repeat(np.arange(len(levels.offsets) - 1), np.diff(levels.offsets))
    # All wide nodes of a level have the same rank, because their own offsets distinguish them.
    rank = level_of_index * (NUM_SLOTS + 2) - np.minimum(in_degree[levels.values], NUM_SLOTS + 1)
    nodes = levels.values[np.argsort(rank, kind="stable")]
    index_of_node = _inverse(nodes)
    if num_nodes == num_operations:
        order, operation_offsets = _inverse(index_of_node[node_of]), levels.offsets
        node_of_position = np.empty(0, dtype=np.int64)
    else:
        members = group_by(node_of, np.arange(num_operations), num_nodes)
        order = concatenate(members, nodes)
        operation_offsets = offsets_of(np.diff(members.offsets)[nodes])[levels.offsets]
        node_of_position = index_of_node[node_of[order]]
    return _Numbering(
        index_of_node=index_of_node,
        position_of_operation=_inverse(order),
        order=order,
        node_of_position=node_of_position,
        operation_offsets=operation_offsets,
        level_of_index=level_of_index,
        degree_of_index=in_degree[nodes],
    )


def _inverse(permutation: Index) -> Index:
    inverse: Index = np.empty_like(permutation)
    inverse[permutation] = np.arange(len(permutation))
    return inverse


def _destinations(indices: Index, numbering: _Numbering, level_offsets: Index, slot_begins: Index) -> Index:
    """Return each edge's index in `predecessors`; `indices` are the edges' targets in ascending order."""
    slots = np.arange(len(indices)) - offsets_of(numbering.degree_of_index)[indices]
    is_wide = slots >= NUM_SLOTS
    levels = numbering.level_of_index[indices]
    destinations: Index = slot_begins[levels * NUM_SLOTS + np.minimum(slots, NUM_SLOTS - 1)]
    destinations += indices - level_offsets[levels]
    destinations[is_wide] = slot_begins[-1] + np.arange(np.count_nonzero(is_wide))
    return destinations


def _level_table(node_offsets: Index, operation_offsets: Index, counts: Index, slot_begins: Index) -> tuple[Level, ...]:
    nodes, operations = node_offsets.tolist(), operation_offsets.tolist()
    wide = offsets_of(counts[:, NUM_SLOTS]).tolist()
    begins = slot_begins[:-1].reshape(-1, NUM_SLOTS).tolist()
    return tuple(
        Level(
            first_node=nodes[level],
            last_node=nodes[level + 1],
            first_operation=operations[level],
            last_operation=operations[level + 1],
            slots=tuple((begin, count) for begin, count in zip(begins[level], level_counts, strict=False) if count),
            first_wide=wide[level],
            last_wide=wide[level + 1],
        )
        for level, level_counts in enumerate(counts.tolist())
    )
