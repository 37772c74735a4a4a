"""Operations that run one at a time, as edges of a replay."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain_diagnostics.replay import ReplicaGraph, build_replica_graph


def graph_of_streams(streams: Sequence[int], edges: Sequence[tuple[int, int]]) -> ReplicaGraph:
    """Compile operations; those of one stream run in the order of their ids. Raises: TopologyError."""
    last_on: dict[int, int] = {}
    in_order: list[tuple[int, int]] = []
    for operation, stream in enumerate(streams):
        if stream in last_on:
            in_order.append((last_on[stream], operation))
        last_on[stream] = operation
    size = len(streams)
    return build_replica_graph(size, [*in_order, *edges], start_groups=[-1] * size, is_shared=[False] * size)
