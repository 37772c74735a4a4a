"""The dependency-graph engine: operations, what each waits for, durations -> when each starts and ends.

The only place where time is simulated: what-if analysis, planning and the tests of the schedules use it. It knows
nothing of training; whoever builds a graph decides what an operation is. numpy and the standard library only.
"""

from __future__ import annotations

from megatrain.replay.build import build_graph
from megatrain.replay.evaluation import Times, evaluate
from megatrain.replay.graph import Graph
from megatrain.replay.replicas import ReplicaGraph, build_replica_graph, evaluate_replicas

__all__ = [
    "Graph",
    "ReplicaGraph",
    "Times",
    "build_graph",
    "build_replica_graph",
    "evaluate",
    "evaluate_replicas",
]
