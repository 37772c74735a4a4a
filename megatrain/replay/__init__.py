"""The dependency-graph engine: operations, their dependencies and durations -> when each operation ends.

The what-if analysis of the diagnostics and the tests of the schedules use it. It does not depend on training; the
builder of a graph decides what an operation is. numpy and the standard library only.
"""

from __future__ import annotations

from megatrain.replay.replicas import ReplicaGraph, build_replica_graph, evaluate_replicas

__all__ = ["ReplicaGraph", "build_replica_graph", "evaluate_replicas"]
