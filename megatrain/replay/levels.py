"""Topological levels, found with numpy: the nodes of a level can run only after a node of the level before.

A node is an operation, or a group of operations that start together.
"""

from __future__ import annotations

import numpy as np

from megatrain.replay.csr import Index, Rows, concatenate, group_by, offsets_of


def topological_levels(num_nodes: int, sources: Index, targets: Index) -> Rows:
    """Return the nodes of each level; a node in no level is on a cycle or behind one.

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
