"""The subjects of the heat map: a measure of an operation, or a reading of the GPUs or links of hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from megatrain.contracts.black_box.operations import MODEL_COMPUTES, Operation
from megatrain_dashboard.sources.hosts import hosts_of
from megatrain_diagnostics.analysis.heat_scale import Floats
from megatrain_diagnostics.analysis.own_time import per_pass
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.store.device_queries import gpu_cells, link_cells
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.step_cells import Aggregate, step_cells

_PASSES = frozenset(operation.number for operation in MODEL_COMPUTES)


class Measure(StrEnum):
    """The quantity of an operation that is shown."""

    SUM = "sum"
    MAX = "max"
    COUNT = "count"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Subject(ABC):
    """The shown quantity. `least_spread`: lower limit of the spread of peers, in `unit`; it hides tiny differences."""

    name: str
    measure: str
    unit: str
    least_spread: float

    @abstractmethod
    def cells(self, events: StoredEvents, roster: Roster, steps: range) -> Floats:
        """Return the values in `unit`; NaN: nothing is known. Shapes: [steps, ranks]. Raises: DataError."""

    def per_pass(self, events: StoredEvents, roster: Roster, steps: range) -> Floats | None:
        """Return factors that make values of ranks with unequal numbers of micro-batches comparable.

        None: all factors are 1. Shapes: [steps, ranks]. Raises: DataError.
        """
        return None


@dataclass(frozen=True, slots=True)
class _OperationSubject(Subject):
    number: int
    aggregate: Aggregate
    per_unit: float
    """The number of stored units in one `unit`."""

    def cells(self, events: StoredEvents, roster: Roster, steps: range) -> Floats:
        found = step_cells(events, roster.round, self.number, self.aggregate, steps, roster.layout.world_size)
        return found / self.per_unit

    def per_pass(self, events: StoredEvents, roster: Roster, steps: range) -> Floats | None:
        if self.aggregate != "sum_ns" or self.number not in _PASSES:
            return None
        num_passes = step_cells(events, roster.round, self.number, "count", steps, roster.layout.world_size)
        found = per_pass(num_passes)
        return None if (found == 1.0).all() else found


@dataclass(frozen=True, slots=True)
class _GpuSubject(Subject):
    sql: str

    def cells(self, events: StoredEvents, roster: Roster, steps: range) -> Floats:
        if not steps:
            return np.zeros((0, roster.layout.world_size))
        return gpu_cells(events, self.sql, roster.round, steps, roster.layout.world_size)


@dataclass(frozen=True, slots=True)
class _LinkSubject(Subject):
    sql: str

    def cells(self, events: StoredEvents, roster: Roster, steps: range) -> Floats:
        if not steps:
            return np.zeros((0, roster.layout.world_size))
        hosts = hosts_of(roster)
        return link_cells(events, self.sql, roster.round, steps, hosts.names)[:, hosts.of_rank]


def _sum_of_known(*columns: str) -> str:
    """Return SQL for the sum of columns; columns without a reading count as 0."""
    return " + ".join(f"(CASE WHEN isnan({name}) THEN 0 ELSE {name} END)" for name in columns)


_OF_OPERATION: Mapping[Measure, tuple[Aggregate, str, float, float]] = {
    Measure.SUM: ("sum_ns", "s", 1e9, 1e-6),
    Measure.MAX: ("max_ns", "s", 1e9, 1e-6),
    Measure.COUNT: ("count", "spans", 1.0, 1.0),
    Measure.BYTES: ("num_bytes", "bytes", 1.0, 1.0),
}
"""Column, unit, how many stored units make one unit, and `Subject.least_spread`."""
_NEWEST = "newest"
_DEVICES: tuple[Subject, ...] = (
    _GpuSubject("gpu-temperature", _NEWEST, "C", 1.0, "temperature_c"),
    _GpuSubject("gpu-memory-temperature", _NEWEST, "C", 1.0, "memory_temperature_c"),
    # a cell shows its greatest value, so a clock is shown by how far it is below its maximum
    _GpuSubject("gpu-clock-lost", _NEWEST, "MHz", 15.0, "max_sm_clock_mhz - sm_clock_mhz"),
    _GpuSubject("gpu-power", _NEWEST, "W", 10.0, "power_w"),
    _GpuSubject("gpu-idle", _NEWEST, "%", 1.0, "100 - 100 * utilization"),
    _GpuSubject("gpu-memory-used", _NEWEST, "bytes of memory", 1e6, "memory_used_bytes"),
    _GpuSubject("gpu-memory-errors", _NEWEST, "errors", 1.0, _sum_of_known("corrected_errors", "uncorrected_errors")),
    _GpuSubject("gpu-nvlink-errors", _NEWEST, "errors", 1.0, "nvlink_errors"),
    _LinkSubject("link-errors", _NEWEST, "errors", 1.0, _sum_of_known("rx_errors", "tx_errors", "symbol_errors")),
)
DEVICE_SUBJECTS: Mapping[str, Subject] = {subject.name: subject for subject in _DEVICES}
"""By name; each is a value of the parameter `operation` of /heat."""


def subject_of(name: str, measure: Measure) -> Subject | None:
    """Return the subject of a name; None: there is none. Device readings have no measures."""
    if name in DEVICE_SUBJECTS:
        return DEVICE_SUBJECTS[name]
    aggregate, unit, per_unit, least_spread = _OF_OPERATION[measure]
    for operation in Operation:
        if operation.value == name:
            return _OperationSubject(name, measure.value, unit, least_spread, operation.number, aggregate, per_unit)
    return None
