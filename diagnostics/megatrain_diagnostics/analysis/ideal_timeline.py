"""Computes the times of a timeline's slices in a job without stragglers, and which slices are on the critical path.

Each slice is a part of an operation of the what-if model. The model computes when each operation would begin and end,
relative to the start of its step, if every operation took its ideal time. The critical path comes from a replay of the
steps with measured times. It is the chain of operations from the last end of a step back to its start, in which each
operation waits for the previous one. A step becomes shorter only if an operation of this chain does, and only until
another chain is longer. In a replay an operation starts exactly when the last operation that it waits for has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain_diagnostics.analysis.exchanges import end_ns
from megatrain_diagnostics.analysis.whatif import ReplayModel, make_model
from megatrain_diagnostics.analysis.whatif.from_spans import SpanPlaces, operations_of, places_of
from megatrain_diagnostics.analysis.whatif.span_rows import NUMBER_OF
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.rows import ABSENT, begins_run, earliest_at, positions_of
from megatrain_diagnostics.events.tables import Int64, Spans
from megatrain_diagnostics.replay import Matrix, Node, ReplicaGraph

_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True, eq=False)
class IdealTimes:
    """Shapes: begin_ns, length_ns, is_critical [slices]; steps, replayed_s [steps]."""

    begin_ns: Int64
    """Unix ns; for a slice without an ideal time, length_ns is -1."""
    length_ns: Int64
    is_critical: NDArray[np.bool_]
    steps: Int64
    replayed_s: NDArray[np.float64]
    """Duration of each step without gaps between operations."""
    ideal_s: float
    notes: tuple[str, ...]


def ideal_times(slices: Spans, whole: Spans, roster: Roster, job: str) -> IdealTimes:
    """Return the ideal time of each slice. `whole`: the spans for the model, including the slices.

    Raises: DataError if no step can be used.
    """
    model = make_model(*operations_of(whole, roster, job))
    places = places_of(whole, roster)
    row = _rows_in(slices, whole)
    operation = np.where(row >= 0, _operations(model, places)[row], ABSENT)
    ends = model.ideal_ends()[:, 0, 0]
    known = np.flatnonzero(operation >= 0)
    begin_ns, length_ns = np.zeros(len(row), dtype=np.int64), np.full(len(row), -1, dtype=np.int64)
    numbers = operation[known]
    first = _step_begins(whole, places, slices.step[known])
    begin_ns[known] = first + np.rint((ends[numbers] - model.ideal_s[numbers]) * _NS_PER_S).astype(np.int64)
    length_ns[known] = np.maximum(np.rint(model.ideal_s[numbers] * _NS_PER_S), 0).astype(np.int64)
    replayed = model.choose(lambda key: True)
    return IdealTimes(
        begin_ns=begin_ns,
        length_ns=length_ns,
        is_critical=_critical(slices, operation, np.where(row >= 0, places.dp_rank[row], ABSENT), model, replayed),
        steps=model.lanes.steps,
        replayed_s=replayed.max(axis=(0, 1)),
        ideal_s=float(ends.max()),
        notes=model.lanes.notes,
    )


def _rows_in(slices: Spans, whole: Spans) -> Int64:
    """Return the row of each slice in `whole`, which is not empty; ABSENT: not found."""
    keys = _key(whole)
    order = np.argsort(keys, kind="stable")
    position = positions_of(_key(slices), keys[order])
    found: Int64 = np.where(position >= 0, order[position], ABSENT)
    return found


def _key(spans: Spans) -> Int64:
    # the record's number modulo 2^40, which a rank with a million records per second reaches after 12 days of one round
    return spans.rank.astype(np.int64) << 40 | spans.sequence & ((1 << 40) - 1)


def _operations(model: ReplayModel, places: SpanPlaces) -> Int64:
    """Return the number of each span's operation in the model; ABSENT: none."""
    most = int(places.sequence.max(initial=0)) + 1
    num_stages = model.lanes.num_stages
    number_of = np.full(num_stages * len(NUMBER_OF) * most, ABSENT, dtype=np.int64)
    for number, key in enumerate(model.keys):
        if key.sequence < most:
            number_of[(key.stage * len(NUMBER_OF) + NUMBER_OF[key.kind]) * most + key.sequence] = number
    is_known = (places.kind >= 0) & (places.stage < num_stages)
    code = (places.stage * len(NUMBER_OF) + places.kind) * most + places.sequence
    found: Int64 = np.where(is_known, number_of[np.where(is_known, code, 0)], ABSENT)
    return found


def _step_begins(whole: Spans, places: SpanPlaces, steps: NDArray[np.int32]) -> Int64:
    """Return when the first operation of each of these steps began."""
    has_place = places.kind >= 0
    known, place = np.unique(whole.step[has_place], return_inverse=True)
    first = earliest_at(len(known), place.reshape(-1), places.start_ns[has_place])
    return first[np.searchsorted(known, steps)]


def _critical(
    slices: Spans, operation: Int64, dp_rank: Int64, model: ReplayModel, replayed: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Mark the slices on the critical path. Of the slices of tensor-parallel ranks, the last to end is marked."""
    is_critical = np.zeros(len(operation), dtype=bool)
    ends = end_ns(slices)
    for column, step in enumerate(model.lanes.steps.tolist()):
        rows = np.flatnonzero((slices.step == step) & (operation >= 0))
        cell = operation[rows] * model.num_dp + dp_rank[rows]
        latest_first = np.lexsort((-ends[rows], cell))
        rows, cell = rows[latest_first], cell[latest_first]
        chain = critical_path(model.dependencies.graph, replayed[:, :, column])
        wanted = np.array([number * model.num_dp + replica for number, replica in chain], dtype=np.int64)
        is_critical[rows[begins_run(cell) & np.isin(cell, wanted)]] = True
    return is_critical


def critical_path(graph: ReplicaGraph, ends: Matrix) -> tuple[tuple[int, int], ...]:
    """Return (operation, replica) along the critical path, in the order of time.

    Operations that start together wait for the last of them to arrive, which is then on the path too. Of several
    equally late operations, one of the same replica is preferred, then one that the operation itself waits for, then
    the one of the lowest replica, then the one with the lowest number.
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
    """Return the operation that reached the common start last, and the operation that it waited for; None: none."""
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
