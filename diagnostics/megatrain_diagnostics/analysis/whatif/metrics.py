"""Computes the figures of what-if analysis: how much slower a job is because of stragglers, and which ranks cause it.

S is the replayed step time with measured durations divided by the ideal step time. S of a part (kind of operation,
data-parallel rank, stage) is S of a job in which only this part is not ideal. M_W and M_S are the fractions of the
slowdown that would disappear if the slowest 3 % of the workers, or the last stage, were ideal. The launch figures are
the cost of gaps between operations, which S does not include.
Source: OSDI'25 sec. 3.2 (eq. 1, 2, 4, 5) and sec. 5.2.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from megatrain_diagnostics.analysis.whatif import kinds
from megatrain_diagnostics.analysis.whatif.lanes import OperationKey
from megatrain_diagnostics.analysis.whatif.model import ReplayModel
from megatrain_diagnostics.analysis.whatif.operations import ranks_per_row
from megatrain_diagnostics.events.tables import Flags, Float64, Int64

WORST_WORKERS = 0.03
"""Fraction of the workers that are ideal for M_W."""
DECOMPOSED_FROM = 1.03
"""A smaller slowdown is not decomposed into parts, as in the public tool."""
FIRST_OPERATION = "first-op"
"""The first operation of a stage in a step. Gaps before it are a separate class: they are due to the data loader."""

Name = TypeVar("Name", int, str)


@dataclass(frozen=True, slots=True)
class PartSlowdowns:
    """Part -> slowdown, over all steps and by step, the slowest first."""

    overall: dict[str, float]
    per_step: dict[int, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The slowdown of a job by kinds of parts."""

    by_optype: PartSlowdowns
    by_dp_rank: PartSlowdowns
    by_stage: PartSlowdowns


@dataclass(frozen=True, slots=True)
class Explained:
    """The part of the slowdown that a part of the job explains. Units: seconds per step."""

    trem: float
    """Step time with measured durations, and this part ideal."""
    tadd: float
    """Step time with ideal durations, and this part as measured."""
    tori: float
    tideal: float

    @property
    def rem(self) -> float:
        """The fraction of the slowdown that disappears if the part is ideal; 0 without a slowdown."""
        return self._share(self.tori - self.trem)

    @property
    def add(self) -> float:
        return self._share(self.tadd - self.tideal)

    def _share(self, seconds: float) -> float:
        slowdown = self.tori - self.tideal
        return seconds / slowdown if slowdown != 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class WhatIf:
    """All figures. Units: seconds; ratios. By step: {step: figure}."""

    measured_s: dict[int, float]
    without_gaps_s: dict[int, float]
    """The replayed step time with measured durations and without gaps between operations; the numerator of S."""
    ideal_s: dict[int, float]
    launch_slowdown: float
    launch_slowdown_by_step: dict[int, float]
    slowdown: float
    """S, the step time without gaps divided by the ideal step time."""
    slowdown_by_step: dict[int, float]
    parts: Decomposition
    launch_parts: Decomposition | None
    """None if `launch_slowdown` is below `DECOMPOSED_FROM`."""
    workers: Explained
    """M_W is `workers.rem`."""
    worst_ranks: tuple[int, ...]
    last_stage: Explained
    """M_S is `last_stage.rem`; without a pipeline it covers all ranks and has no meaning."""
    notes: tuple[str, ...]

    @property
    def has_stages(self) -> bool:
        return len(self.parts.by_stage.overall) > 1

    @property
    def waste(self) -> float:
        """The fraction of all GPU-hours that is lost to stragglers."""
        return max(0.0, 1.0 - 1.0 / self.slowdown)


def what_if(model: ReplayModel) -> WhatIf:
    """Return all figures of a job's steps."""
    steps = model.lanes.steps
    measured = model.measured_s()
    ends = model.choose(lambda key: True)
    simulated, without_gaps = model.last_ends(ends), ends.max(axis=(0, 1))
    del ends
    ends = model.ideal_ends()
    num_steps = model.num_steps
    ideal = np.repeat(model.last_ends(ends), num_steps)
    longest_ideal = float(ends.max())
    launch_slowdown = _ratio(measured.mean(), simulated.mean())
    parts = _decompose(model, ideal)
    cells = _worst_cells(model, parts)
    is_last_stage = np.arange(model.lanes.num_stages) == model.lanes.num_stages - 1
    last = np.broadcast_to(is_last_stage, model.lanes.ranks.shape)
    tori = float(without_gaps.mean())
    return WhatIf(
        measured_s=_by_step(steps, measured),
        without_gaps_s=_by_step(steps, without_gaps),
        ideal_s=_by_step(steps, np.full(num_steps, longest_ideal)),
        launch_slowdown=launch_slowdown,
        launch_slowdown_by_step=_by_size(_by_step(steps, _ratios(measured, simulated))),
        slowdown=_ratio(without_gaps.mean(), ideal.mean()),
        slowdown_by_step=_by_size(_by_step(steps, _ratios(without_gaps, ideal))),
        parts=parts,
        launch_parts=_decompose_gaps(model, simulated) if launch_slowdown >= DECOMPOSED_FROM else None,
        workers=_explain(model, cells, tori, longest_ideal),
        worst_ranks=tuple(sorted(model.lanes.ranks[cells].tolist())),
        last_stage=_explain(model, last, tori, longest_ideal),
        notes=model.lanes.notes,
    )


def gain_without(model: ReplayModel, ranks: Collection[int]) -> float:
    """Return by how many seconds a step would be shorter if these ranks were ideal; 0 if they have no rows.

    A row represents a rank and the following ranks of the same tensor- and context-parallel group.
    """
    shape = model.shape
    width = ranks_per_row(shape.world_size, shape.dp_size * shape.pp_size)
    cells = np.isin(model.lanes.ranks, [rank - shift for rank in ranks for shift in range(width)])
    if not cells.any():
        return 0.0
    as_measured = model.choose(lambda key: True).max(axis=(0, 1)).mean()
    return max(0.0, float(as_measured - model.choose_cells(~cells).max(axis=(0, 1)).mean()))


def _explain(model: ReplayModel, cells: Flags, tori: float, tideal: float) -> Explained:
    removed = model.choose_cells(~cells).max(axis=(0, 1)).mean()
    added = model.choose_cells(cells).max(axis=(0, 1)).mean()
    return Explained(trem=float(removed), tadd=float(added), tori=tori, tideal=tideal)


def _worst_cells(model: ReplayModel, parts: Decomposition) -> Flags:
    """Return the slowest workers. A worker's slowdown is estimated as the minimum of its dp rank's and its stage's."""
    ranks = model.lanes.ranks
    by_rank = [parts.by_dp_rank.overall[str(dp)] for dp in range(ranks.shape[0])]
    by_stage = [parts.by_stage.overall[str(stage)] for stage in range(ranks.shape[1])]
    scores = np.minimum.outer(np.array(by_rank), np.array(by_stage)).reshape(-1)
    order = np.lexsort((ranks.reshape(-1), -scores))
    num_worst = -int(-ranks.size * WORST_WORKERS // 1)
    worst: Flags = np.isin(np.arange(ranks.size), order[:num_worst]).reshape(ranks.shape)
    return worst


def _decompose(model: ReplayModel, ideal: Float64) -> Decomposition:
    def of_class(name: str) -> Float64:
        return model.last_ends(model.choose(lambda key: kinds.class_of(key.kind) == name))

    def of_stage(stage: int) -> Float64:
        return model.last_ends(model.choose(lambda key: key.stage == stage))

    by_class = {name: of_class(name) for name in sorted({kinds.class_of(key.kind) for key in model.keys})}
    by_stage = {str(stage): of_stage(stage) for stage in range(model.lanes.num_stages)}
    one_rank = model.last_ends(model.one_rank_ends()).reshape(model.num_dp, model.num_steps)
    by_dp_rank = {str(dp): one_rank[dp] for dp in range(model.num_dp)}
    steps = model.lanes.steps
    return Decomposition(
        _parts(by_class, ideal, steps), _parts(by_dp_rank, ideal, steps), _parts(by_stage, ideal, steps)
    )


def _decompose_gaps(model: ReplayModel, simulated: Float64) -> Decomposition:
    """Return the cost of the gaps before operations, by class of operation, data-parallel rank and stage."""
    late = model.late_s

    def of_class(name: str) -> Float64:
        return model.last_ends(
            model.with_lateness(lambda number: late[number] if _gap_class(model.keys[number]) == name else 0.0)
        )

    def of_stage(stage: int) -> Float64:
        return model.last_ends(
            model.with_lateness(lambda number: late[number] if model.keys[number].stage == stage else 0.0)
        )

    def of_dp_rank(dp: int) -> Float64:
        own = np.zeros((model.num_dp, model.num_steps))

        def lateness(number: int) -> Float64:
            own[dp] = late[number, dp]
            return own

        return model.last_ends(model.with_lateness(lateness))

    steps = model.lanes.steps
    classes = sorted({_gap_class(key) for key in model.keys})
    return Decomposition(
        _parts({name: of_class(name) for name in classes}, simulated, steps),
        _parts({str(dp): of_dp_rank(dp) for dp in range(model.num_dp)}, simulated, steps),
        _parts({str(stage): of_stage(stage) for stage in range(model.lanes.num_stages)}, simulated, steps),
    )


def _gap_class(key: OperationKey) -> str:
    first = kinds.FORWARD if key.stage == 0 else kinds.FORWARD_RECV
    return FIRST_OPERATION if key.kind == first and key.sequence == 0 else kinds.class_of(key.kind)


def _parts(times: dict[str, Float64], reference: Float64, steps: Int64) -> PartSlowdowns:
    ratios = {name: _ratios(step_times, reference) for name, step_times in times.items()}
    return PartSlowdowns(
        overall=_by_size({name: _ratio(step_times.mean(), reference.mean()) for name, step_times in times.items()}),
        per_step={
            step: _by_size({name: float(ratio[index]) for name, ratio in ratios.items()})
            for index, step in enumerate(steps.tolist())
        },
    )


def _by_step(steps: Int64, values: Float64) -> dict[int, float]:
    return dict(zip(steps.tolist(), values.tolist(), strict=True))


def _by_size(figures: dict[Name, float]) -> dict[Name, float]:
    return dict(sorted(figures.items(), key=lambda item: -item[1]))


def _ratio(value: float, reference: float) -> float:
    """Return value / reference; 1 if the reference is zero."""
    return float(value / reference) if reference > 0.0 else 1.0


def _ratios(values: Float64, references: Float64) -> Float64:
    is_defined = references > 0.0
    ratios: Float64 = np.where(is_defined, values, 1.0) / np.where(is_defined, references, 1.0)
    return ratios
