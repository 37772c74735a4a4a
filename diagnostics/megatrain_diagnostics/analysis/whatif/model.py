"""The model of a job's steps, which can be replayed with other durations.

A compute takes its measured duration; a message or collective takes the time from the latest start of all participants
to its own end, so that waiting is not included. The ideal duration of an operation is the mean (for communication the
median) of its kind over all steps, stages and data-parallel ranks. A replay with measured durations is the job without
gaps; a replay with ideal durations is the job without stragglers. Both are simulated, so that the error of the
simulation cancels in their ratio.
Source: OSDI'25 sec. 3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain_diagnostics.analysis.medians import median
from megatrain_diagnostics.analysis.whatif import kinds
from megatrain_diagnostics.analysis.whatif.dependencies import Dependencies, find_dependencies
from megatrain_diagnostics.analysis.whatif.lanes import Lanes, OperationKey, make_lanes
from megatrain_diagnostics.analysis.whatif.operations import JobShape, OperationTable
from megatrain_diagnostics.events.tables import Float64
from megatrain_diagnostics.replay import evaluate_replicas

CLOCK_TOLERANCE_S = 0.01
"""Limit of the clock error; times that are more negative are set to zero."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplayModel:
    """Steps that can be replayed. Shapes: taken_s, late_s [operation, dp rank, step]; ideal_s [operation]."""

    shape: JobShape
    lanes: Lanes
    dependencies: Dependencies
    taken_s: Float64
    ideal_s: Float64
    late_s: Float64
    """Delay between the end of all dependencies in the same rank and the start of an operation, due to the CPU."""

    @property
    def keys(self) -> tuple[OperationKey, ...]:
        return self.lanes.keys

    @property
    def num_dp(self) -> int:
        return int(self.taken_s.shape[1])

    @property
    def num_steps(self) -> int:
        return int(self.taken_s.shape[2])

    def measured_s(self) -> Float64:
        """Return the measured duration of each step."""
        ends: Float64 = (self.lanes.start_s + self.lanes.duration_s).max(axis=(0, 1))
        return ends

    def choose(self, is_measured: Callable[[OperationKey], bool]) -> Float64:
        """Return the ends of all operations if the chosen ones take their measured and the others their ideal time."""
        chosen = [is_measured(key) for key in self.keys]
        return self._replay(lambda number: self.taken_s[number] if chosen[number] else self.ideal_s[number])

    def choose_cells(self, is_measured: NDArray[np.bool_]) -> Float64:
        """Return the ends if the chosen cells [dp rank, stage] take their measured and the others their ideal time."""

        def durations(number: int) -> Float64 | float:
            cells = is_measured[:, self.keys[number].stage]
            taken: Float64 = self.taken_s[number]
            ideal = float(self.ideal_s[number])
            if cells.all():
                return taken
            return np.where(cells[:, np.newaxis], taken, ideal) if cells.any() else ideal

        return self._replay(durations)

    def with_lateness(self, is_late: Callable[[int], Float64 | float]) -> Float64:
        """Return the ends if operations take their measured durations and start with the given delays."""
        return evaluate_replicas(
            self.dependencies.graph, self.num_dp, self.num_steps, lambda number: self.taken_s[number], is_late
        )

    def ideal_ends(self) -> Float64:
        """Return the ends if everything is ideal. Shape: [operation, 1, 1], because all ranks and steps are equal."""
        return evaluate_replicas(self.dependencies.graph, 1, 1, lambda number: self.ideal_s[number])

    def one_rank_ends(self) -> Float64:
        """Return the ends of one scenario per dp rank, in which this rank is as measured and the others are ideal.

        Shapes: [operation, 2, dp rank * step]. All ideal ranks are equal, so only one of them is simulated.
        """
        num_replicas = min(2, self.num_dp)
        num_columns = self.num_dp * self.num_steps
        mixed = np.empty((num_replicas, num_columns))

        def durations(number: int) -> Float64:
            mixed[0] = self.taken_s[number].reshape(-1)
            mixed[1:] = self.ideal_s[number]
            return mixed

        return evaluate_replicas(self.dependencies.graph, num_replicas, num_columns, durations)

    def last_ends(self, ends: Float64) -> Float64:
        """Return the end of the last optimizer, by step; without an optimizer, the end of the last operation."""
        numbers = [number for number, key in enumerate(self.keys) if key.kind == kinds.OPTIMIZER]
        last: Float64 = (ends[numbers] if numbers else ends).max(axis=(0, 1))
        return last

    def _replay(self, durations: Callable[[int], Float64 | float]) -> Float64:
        return evaluate_replicas(self.dependencies.graph, self.num_dp, self.num_steps, durations)


def make_model(table: OperationTable, shape: JobShape) -> ReplayModel:
    """Return the model of the steps in a table. Raises: DataError if no step is usable."""
    lanes = make_lanes(table, shape)
    first_start = lanes.start_s[:, 0, 0]
    first_end = first_start + lanes.duration_s[:, 0, 0]
    dependencies = find_dependencies(lanes.keys, first_start.tolist(), first_end.tolist())
    taken_s = _taken(lanes, dependencies)
    return ReplayModel(shape, lanes, dependencies, taken_s, _ideal(lanes.keys, taken_s), _lateness(lanes, dependencies))


def _taken(lanes: Lanes, dependencies: Dependencies) -> Float64:
    """Return the durations of operations, without the time of waiting for other participants."""
    taken = lanes.duration_s.copy()
    members: dict[int, list[int]] = defaultdict(list)
    for number, group in enumerate(dependencies.group):
        if dependencies.is_joint[number]:
            members[group if group >= 0 else -1 - number].append(number)
    for numbers in members.values():
        latest = lanes.start_s[numbers[0]]
        for number in numbers[1:]:
            latest = np.maximum(latest, lanes.start_s[number])
        if any(lanes.keys[number].kind in kinds.SHARED for number in numbers):
            latest = latest.max(axis=0, keepdims=True)
        for number in numbers:
            transfer = lanes.start_s[number] + lanes.duration_s[number] - latest
            transfer[transfer <= -CLOCK_TOLERANCE_S] = 0.0
            taken[number] = transfer
    return taken


def _lateness(lanes: Lanes, dependencies: Dependencies) -> Float64:
    late = lanes.start_s.copy()
    for node in dependencies.graph.nodes:
        for number, waits in zip(node.operations, node.waits, strict=True):
            if not waits:
                continue
            ready = lanes.start_s[waits[0]] + lanes.duration_s[waits[0]]
            for wait in waits[1:]:
                np.maximum(ready, lanes.start_s[wait] + lanes.duration_s[wait], out=ready)
            late[number] -= ready
    late[late <= -CLOCK_TOLERANCE_S] = 0.0
    return late


def _ideal(keys: Collection[OperationKey], taken_s: Float64) -> Float64:
    ideal = np.empty(len(keys))
    numbers_of: dict[str, list[int]] = defaultdict(list)
    for number, key in enumerate(keys):
        numbers_of[key.kind].append(number)
    for kind, numbers in numbers_of.items():
        values = taken_s[numbers]
        ideal[numbers] = median(values) if kind in kinds.MEDIAN_KINDS else values.mean()
    return ideal
