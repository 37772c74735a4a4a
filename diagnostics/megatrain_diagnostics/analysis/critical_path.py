"""Which operations a step waited for: the chain from its last end back to its begin, each held up by the one before.

A shorter operation of the chain makes the step shorter, until another chain is the longest; any other operation changes
nothing. The chain is read from a replay, where an operation starts exactly when the last operation that it waits for
has ended.
"""

from __future__ import annotations

import numpy as np

from megatrain.replay import ReplicaGraph
from megatrain.replay.replicas import Matrix, Node


def critical_path(graph: ReplicaGraph, ends: Matrix) -> tuple[tuple[int, int], ...]:
    """Return (operation, replica) along the chain, the first of the step first.

    Operations that start together are held up by the last of them to arrive: that one is in the chain too. Of several
    that are equally late, the one of the same replica counts, then the lowest number.
    Shapes: ends [operation, replica], of one column of `evaluate_replicas`.
    """
    node_of = {operation: node for node in graph.nodes for operation in node.operations}
    if not node_of:
        return ()
    operation, replica = (int(place) for place in np.unravel_index(int(ends.argmax()), ends.shape))
    chain = [(operation, replica)]
    while (found := _held_up_by(node_of[operation], operation, replica, ends)) is not None:
        late, earlier = found
        if late != chain[-1]:
            chain.append(late)
        chain.append(earlier)
        operation, replica = earlier
    return tuple(reversed(chain))


def _held_up_by(
    node: Node, operation: int, replica: int, ends: Matrix
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the operation that reached the common start last, and the one that it waited for; None: there is none."""
    replicas = range(ends.shape[1]) if node.is_shared else (replica,)
    best: tuple[tuple[int, int], tuple[int, int]] | None = None
    best_rank: tuple[float, bool, bool, int, int] | None = None
    for member, waits in zip(node.operations, node.waits, strict=True):
        for wait in waits:
            of_wait = ends[wait]
            for other in replicas:
                rank = (float(of_wait[other]), other == replica, member == operation, -other, -wait)
                if best_rank is None or rank > best_rank:
                    best, best_rank = ((member, other), (wait, other)), rank
    return best
