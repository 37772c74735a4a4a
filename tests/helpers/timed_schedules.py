"""Schedules of pipelines, timed by the replay engine: computes take given times, messages none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.schedule import ActionKind, Schedule
from megatrain_diagnostics.replay import ReplicaGraph, build_replica_graph, evaluate_replicas

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.DGRAD, ActionKind.WGRAD
COMPUTES = (FORWARD, BACKWARD, INPUT, WEIGHT)


@dataclass
class TimedSchedules:
    """Schedules as one graph for the engine; they are independent of each other."""

    streams: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    """Of each compute, its index in COMPUTES."""
    microbatches: list[int] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    num_streams: int = 0

    def add(self, schedule: Schedule) -> slice:
        """Append the computes of a schedule, with an edge for each message as the channels pair them."""
        first = len(self.streams)
        sends: dict[tuple[ActionKind, int], list[int]] = defaultdict(list)
        receives: dict[tuple[ActionKind, int], list[int]] = defaultdict(list)
        for stage, actions in enumerate(schedule.stages):
            awaiting: dict[tuple[bool, int, int], tuple[list[int], int]] = {}
            previous, following = (stage - 1) % schedule.pp_size, (stage + 1) % schedule.pp_size
            for action in actions:
                match action.kind:
                    case ActionKind.FORWARD | ActionKind.BACKWARD | ActionKind.DGRAD:
                        operation = len(self.streams)
                        self.streams.append(self.num_streams + stage)
                        self.kinds.append(COMPUTES.index(action.kind))
                        self.microbatches.append(action.microbatch)
                        key = (action.kind is FORWARD, action.chunk, action.microbatch)
                        if (receive := awaiting.get(key)) is not None:
                            channel, number = receive
                            channel[number] = operation
                    case ActionKind.WGRAD:
                        self.streams.append(self.num_streams + stage)
                        self.kinds.append(COMPUTES.index(WEIGHT))
                        self.microbatches.append(action.microbatch)
                    case ActionKind.SEND_FORWARD | ActionKind.SEND_BACKWARD:
                        sends[action.kind, stage].append(operation)
                    case ActionKind.RECV_FORWARD | ActionKind.RECV_BACKWARD:
                        is_forward = action.kind is ActionKind.RECV_FORWARD
                        sender = (
                            (ActionKind.SEND_FORWARD, previous) if is_forward else (ActionKind.SEND_BACKWARD, following)
                        )
                        channel = receives[sender]
                        awaiting[is_forward, action.chunk, action.microbatch] = (channel, len(channel))
                        channel.append(-1)
        for sender, operations in sends.items():
            self.edges += zip(operations, receives[sender], strict=True)
        self.num_streams += schedule.pp_size
        return slice(first, len(self.streams))

    def ends(self, durations: NDArray[Any]) -> NDArray[Any]:
        """Return when each compute ends, for several sets of durations. Shapes: [sets, computes], [computes, sets]."""
        graph = graph_of_streams(self.streams, self.edges)
        ends: NDArray[Any] = evaluate_replicas(graph, 1, len(durations), lambda operation: durations[:, operation])
        return ends[:, 0]


def pipeline_times(schedule: Schedule, costs: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the duration of a step of the schedule, for several sets of costs of its micro-batches.

    A forward of a chunk takes the cost of the micro-batch, a backward twice that, half of it for each of dgrad and
    wgrad.

    Shapes: costs [sets, micro-batches], result [sets].
    """
    timed = TimedSchedules()
    timed.add(schedule)
    factors = np.array([1, 2, 1, 1])[timed.kinds]
    times: NDArray[np.float64] = timed.ends(costs[:, timed.microbatches] * factors).max(axis=0)
    return times


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
