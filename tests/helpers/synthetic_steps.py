"""Invented steps of a job: totals as ranks stream them, with the effects of one slow part on all others.

A step is: data, passes, reduction of the gradients, optimizer. The stages of a pipeline alternate, so that all ranks of
one are late when one of them is; in the reduction every rank waits for the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.black_box.operations import MODEL_COMPUTES, Operation, StepValue
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.events.roster import Roster, axis_values, make_roster
from megatrain_diagnostics.events.tables import Groups, Ranks, StepTotals, Values, joined
from tests.helpers.table_rows import table_rows

START_NS = 1_700_000_000_000_000_000
STEP_S = 1.0
FORWARD, BACKWARD, OPTIMIZER = 0.3, 0.6, 0.05
TRANSFER_S = 0.02
Array = NDArray[np.float64]


@dataclass
class SyntheticJob:
    """A job whose steps are created one after another."""

    layout: Layout
    ranks_per_host: int = 2
    hosts: Sequence[str] = ()
    """By rank; empty: `ranks_per_host` ranks on each host."""
    noise: float = 0.02
    seed: int = 0
    round: int = 1
    compute_factor: dict[int, float] = field(default_factory=dict)
    """By rank; may be changed between steps."""
    data_s: dict[int, float] = field(default_factory=dict)
    gc_s: dict[int, float] = field(default_factory=dict)
    is_gc_in_passes: bool = False
    work_factor: dict[int, float] = field(default_factory=dict)
    """By rank: squared lengths, which determine the compute time."""
    num_microbatches: dict[int, int] = field(default_factory=dict)
    """By data-parallel rank; 1 for others."""
    work_noise: float = 0.0
    """The noise of the squared lengths of every rank and step."""
    stage_factor: dict[int, float] = field(default_factory=dict)
    transfer_factor: dict[str, float] = field(default_factory=dict)
    """By host: the factor of the transfer times of its link."""
    sequence: int = 0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        places = [self.layout.coordinate(rank) for rank in range(self.world_size)]
        self._stage, self._tp, self._dp = (np.array([one[axis] for one in places]) for axis in ("pp", "tp", "dp"))

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def host_of(self, rank: int) -> str:
        return self.hosts[rank] if self.hosts else f"host-{rank // self.ranks_per_host}"

    def ranks(self) -> Ranks:
        return rank_rows(self.layout, self.round, [self.host_of(rank) for rank in range(self.world_size)])

    def roster(self) -> Roster:
        return make_roster(self.ranks(), empty_groups(), self.round)

    def step(self, step: int, extra: dict[Operation, Array] | None = None) -> tuple[StepTotals, Values]:
        """Return the rows that all ranks stream of a step. `extra`: seconds of other operations by rank."""
        num, random = self.world_size, self._random
        stage, tp, dp = self._stage, self._tp, self._dp
        factor = np.array([self.compute_factor.get(rank, 1.0) for rank in range(num)])
        factor *= np.array([self.stage_factor.get(int(one), 1.0) for one in stage])
        # the ranks of a tensor-parallel group have the same samples
        chance = random.normal(0.0, 1.0, (self.layout.pp_size, self.layout.dp_size))[stage * 0, dp]
        work = np.array([self.work_factor.get(rank, 1.0) for rank in range(num)]) * np.exp(self.work_noise * chance)
        passes = np.array([self.num_microbatches.get(int(one), 1) for one in dp])
        work *= passes
        factor *= work
        factor *= 1.0 + self.noise * random.normal(size=num).clip(-4, 4)
        forward, backward = FORWARD * factor, BACKWARD * factor
        optimizer = np.full(num, OPTIMIZER)
        data = np.full(num, 0.002) + np.array([self.data_s.get(rank, 0.0) for rank in range(num)])
        gc = np.array([self.gc_s.get(rank, 0.0) for rank in range(num)])
        inside = gc if self.is_gc_in_passes else 0.0
        forward = forward + inside
        busy = forward + backward + data + (0.0 if self.is_gc_in_passes else gc)
        # A pipeline is as slow as its slowest rank.
        column = np.array([busy[dp == one].max() for one in range(self.layout.dp_size)])[dp]
        receive = column - busy if self.layout.pp_size > 1 else np.zeros(num)
        links = np.array([self.transfer_factor.get(self.host_of(rank), 1.0) for rank in range(num)])
        transfer = np.zeros(num)
        for one in range(self.layout.pp_size):
            for other in range(self.layout.tp_size):
                members = (stage == one) & (tp == other)
                transfer[members] = TRANSFER_S * links[members].max() * (1 + 0.02 * abs(random.normal()))
        reduce = column.max() - column + transfer if self.layout.dp_size > 1 else np.zeros(num)
        seconds = {
            # Ranks end a step together, because the norm is that of all gradients.
            Operation.STEP: np.full(num, (busy - data + receive + reduce + optimizer).max()),
            Operation.FORWARD_COMPUTE: forward,
            Operation.BACKWARD_COMPUTE: backward,
            Operation.OPTIMIZER: optimizer,
            Operation.DATA_WAIT: data,
            Operation.GRADS_REDUCE_SCATTER: reduce,
            **({Operation.FORWARD_RECV: receive} if self.layout.pp_size > 1 else {}),
            **({Operation.GC: gc} if gc.any() else {}),
            **(extra or {}),
        }
        return self._totals(step, seconds, passes), self._values(step, work)

    def _totals(self, step: int, seconds: dict[Operation, Array], passes: NDArray[np.int64]) -> StepTotals:
        num, count = self.world_size, len(seconds)
        self.sequence += count
        sums = np.concatenate([(second * 1e9).astype(np.int64) for second in seconds.values()])
        columns = {
            "round": self.round, "rank": np.tile(np.arange(num), count), "step": step,
            "sequence": np.repeat(self.sequence + np.arange(count), num),
            "operation": np.repeat([second.number for second in seconds], num),
            "start_ns": START_NS + int(step * STEP_S * 1e9), "sum_ns": sums, "max_ns": sums,
            "count": np.concatenate([passes if each in MODEL_COMPUTES else np.ones(num) for each in seconds]),
            "num_bytes": np.repeat([1_000_000 if second.is_collective else 0 for second in seconds], num),
        }  # fmt: skip
        return table_rows(StepTotals, columns)

    def _values(self, step: int, work: Array) -> Values:
        loss = [float(x) for x in (3.0 + 0.01 * self._random.normal(), 1.0 + 0.05 * self._random.normal())]
        return step_values(self.round, step, {StepValue.LOSS: loss[0], StepValue.GRAD_NORM: loss[1]}, work * 1e6)


def step_values(
    round_number: int, step: int, values: dict[StepValue, float], squared_lengths: Sequence[float] | Array = ()
) -> Values:
    """Return rows of rank 0 for `values`, and of each rank for its squared lengths."""
    rows = [(0, int(kind), value) for kind, value in values.items()]
    rows += [(rank, int(StepValue.SQUARED_LENGTHS), float(length)) for rank, length in enumerate(squared_lengths)]
    rank, kind, value = zip(*rows, strict=True)
    columns = {
        "round": round_number, "rank": rank, "sequence": [step * 1000 + place for place in range(len(rows))],
        "step": step, "kind": kind, "at_ns": START_NS + int(step * STEP_S * 1e9), "value": value,
    }  # fmt: skip
    return table_rows(Values, columns)


def values_of_ranks(ranks: Sequence[int], step: int, values: dict[StepValue, float], round_number: int = 1) -> Values:
    """Return rows of each of these ranks for the same `values`."""
    table = step_values(round_number, step, values)
    return joined(Values, [replace(table, rank=np.full_like(table.rank, rank)) for rank in ranks])


def rank_rows(layout: Layout, round_number: int, hosts: Sequence[str]) -> Ranks:
    """Return a row for each rank of a layout; `hosts`: by rank."""
    ranks = range(layout.world_size)
    places = [axis_values(layout, rank) for rank in ranks]
    columns = {
        "round": round_number, "rank": ranks, **{name: [place[name] for place in places] for name in places[0]},
        "pid": [1000 + rank for rank in ranks], "at_ns": START_NS, "host": hosts, "branch": "main",
    }  # fmt: skip
    return table_rows(Ranks, columns)


def empty_groups() -> Groups:
    return joined(Groups, [])
