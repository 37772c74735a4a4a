"""Dependencies between the operations of one data-parallel rank in a step.

A rank computes one operation at a time. Messages of the same kind run one after the other. A compute waits for the
message with its input, and a send for the compute of its content. Parameters are gathered before their first forward.
The operations after the last backward have a fixed order. Messages and collectives start when all participants have
arrived. The order is taken from one step, and used for all steps and data-parallel ranks.
Source: OSDI'25 sec. 3.2 for streams and dependencies, the public traces for the recorded operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatrain.contracts.errors import DataError, TopologyError
from megatrain_diagnostics.analysis.whatif import kinds
from megatrain_diagnostics.analysis.whatif.lanes import OperationKey
from megatrain_diagnostics.analysis.whatif.messages import Edges, Step, add_messages
from megatrain_diagnostics.replay import ReplicaGraph, build_replica_graph


@dataclass(frozen=True, slots=True)
class Dependencies:
    """The dependencies between the operations of a pipeline; `graph` also has the groups that start together."""

    graph: ReplicaGraph
    is_joint: tuple[bool, ...]
    """Whether the operation starts together with others, so that its duration is the transfer time without waiting."""
    group: tuple[int, ...]
    """For each operation the number of its group of operations in the pipeline that start together; -1: none."""


def find_dependencies(keys: Sequence[OperationKey], start_s: Sequence[float], end_s: Sequence[float]) -> Dependencies:
    """Return the dependencies; the times of one step give the order. Raises: DataError if the step is inconsistent."""
    step = Step(keys, start_s, end_s)
    edges: Edges = []
    groups: list[list[int]] = []
    add_messages(step, edges, groups)
    for stage in range(step.num_stages):
        computes = step.by_start(step.of(stage, kinds.FORWARD, kinds.BACKWARD, kinds.BACKWARD_WEIGHT))
        _chain(edges, computes)
        _add_backward_channels(step, stage, computes, edges)
        _chain(edges, step.by_start(step.of(stage, kinds.PARAMS_GATHER, kinds.GRADS_SCATTER)))
        _add_gathers(step, stage, edges)
        _add_ending(step, stage, computes, edges)
    groups += _collective_groups(step)
    group_of = [-1] * len(keys)
    for group, members in enumerate(groups):
        for member in members:
            group_of[member] = group
    is_joint = tuple(key.kind in kinds.MESSAGES or key.kind in kinds.COLLECTIVES for key in keys)
    try:
        graph = build_replica_graph(
            len(keys),
            edges,
            start_groups=group_of,
            is_shared=[key.kind in kinds.SHARED for key in keys],
            describe=lambda number: str(keys[number]),
        )
    except TopologyError as error:
        raise DataError(f"the operations have no valid order: {error}") from error
    return Dependencies(graph, is_joint, tuple(group_of))


def _chain(edges: Edges, numbers: Sequence[int]) -> None:
    edges.extend(pairwise(numbers))


def _add_backward_channels(step: Step, stage: int, computes: Sequence[int], edges: Edges) -> None:
    """Make the first backward messages wait for the compute two places before the first backward."""
    first = next((at for at, number in enumerate(computes) if step.keys[number].kind == kinds.BACKWARD), 0)
    if first < 2:
        return
    for kind in (kinds.BACKWARD_RECV, kinds.BACKWARD_SEND):
        edges += [(computes[first - 2], number) for number in step.of(stage, kind)[:1]]


def _add_gathers(step: Step, stage: int, edges: Edges) -> None:
    """Make a chunk's first forward wait for the chunk's last gather."""
    forwards = step.by_start(step.of(stage, kinds.FORWARD))
    first_of = {step.keys[number].chunk: number for number in reversed(forwards)}
    last_gather = {step.keys[number].chunk: number for number in step.of(stage, kinds.PARAMS_GATHER)}
    edges += [(gather, first_of[chunk]) for chunk, gather in last_gather.items() if chunk in first_of]


def _add_ending(step: Step, stage: int, computes: Sequence[int], edges: Edges) -> None:
    """Add the dependencies of operations after the last backward, for overlapped or separate reduce-scatters."""
    scatters = step.of(stage, kinds.GRADS_SCATTER)
    is_overlapped = any(key.kind == kinds.SEPARATE_REDUCE for key in step.keys)
    begin = step.of(stage, kinds.GC)
    if computes:
        last = max(computes, key=lambda number: (step.end_s[number], -computes.index(number)))
        _chain(edges, [last, *begin])
        begin = begin[-1:] or [last]
    middle = step.of(stage, kinds.NORM_REDUCE, kinds.EMBEDDING_REDUCE)
    if is_overlapped:
        middle += step.of(stage, kinds.SEPARATE_REDUCE)
        begin = [*begin, *scatters[-1:]]
        _add_scatters(step, stage, scatters, edges)
    else:
        middle += scatters
    ending = [*middle, *step.of(stage, kinds.CLIP, kinds.OPTIMIZER)]
    edges += [(number, ending[0]) for number in begin if ending]
    _chain(edges, ending)


def _add_scatters(step: Step, stage: int, scatters: Sequence[int], edges: Edges) -> None:
    """Make a chunk's first reduce-scatter wait for the chunk's last backward, dgrad and wgrad."""
    last_of: dict[int, int] = {}
    for number in step.of(stage, kinds.BACKWARD, kinds.BACKWARD_WEIGHT):
        chunk = step.keys[number].chunk
        if chunk not in last_of or step.end_s[number] > step.end_s[last_of[chunk]]:
            last_of[chunk] = number
    first_scatter = {step.keys[number].chunk: number for number in reversed(scatters)}
    edges += [(last_of[chunk], scatter) for chunk, scatter in first_scatter.items() if chunk in last_of]


def _collective_groups(step: Step) -> list[list[int]]:
    """Return the groups of collectives in a pipeline.

    The first and the last stage sum gradients of tied embeddings; all stages clip together.
    """
    ends = sorted({0, step.num_stages - 1})
    pairs = [step.of(stage, kinds.EMBEDDING_REDUCE) for stage in ends]
    clips = [step.of(stage, kinds.CLIP) for stage in range(step.num_stages)]
    for what, lists in ((kinds.EMBEDDING_REDUCE, pairs), (kinds.CLIP, clips)):
        if len({len(numbers) for numbers in lists}) > 1:
            counts = [len(numbers) for numbers in lists]
            raise DataError(f"the stages have different numbers of {what} in a step: {counts}")
    return [list(members) for lists in (pairs, clips) for members in zip(*lists, strict=True)]
