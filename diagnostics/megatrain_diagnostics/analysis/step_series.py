"""The series that drift is sought in: how long each step took and how much work it did, from the sums of some ranks.

All ranks of a job go at one pace, so a few of them tell the time of all. A step's time is that of the step itself and
of its wait for data, without what lies between steps. Left out are the first steps, which compile and allocate, and
those after a checkpoint or an evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain.contracts.operations import Operation
from megatrain.contracts.step_values import StepValue
from megatrain_diagnostics.events.tables import Float64, Int64, StepTotals, Values, select

NUM_WARMUP_STEPS = 3
SERIES_OPERATIONS = tuple(
    operation.number
    for operation in (
        *(Operation.STEP, Operation.DATA_WAIT, Operation.GC),
        *(Operation.CHECKPOINT, Operation.CHECKPOINT_LOAD, Operation.EVALUATION),
    )
)
"""Numbers of the operations whose sums the series need."""
_DISTURBING = (Operation.CHECKPOINT, Operation.CHECKPOINT_LOAD, Operation.EVALUATION)


@dataclass(frozen=True, slots=True, eq=False)
class StepSeries:
    """One entry a step, ascending, the disturbed steps left out."""

    step: Int64
    at_ns: Int64
    seconds: Float64
    """Median over the ranks."""
    gc_seconds: Float64
    """The most that a rank spent collecting."""
    work: Float64
    """Done by a rank in the step, 0: not known."""
    work_name: str
    """"FLOP", "tokens" of all ranks, or "" where neither is known."""
    peak_flops: float
    """What a device could do in a second, 0: not known."""
    num_left_out: int

    def __len__(self) -> int:
        return len(self.step)


def step_series(totals: StepTotals, values: Values) -> StepSeries:
    """Return the series of one round's steps.

    A number that one rank alone tells of, where others tell of other steps, is nonsense of that rank.
    """
    totals = select(totals, totals.step >= 0)
    of_step = np.isin(totals.operation, [Operation.STEP.number, Operation.DATA_WAIT.number])
    keys, of_row = np.unique(totals.rank[of_step].astype(np.int64) << 32 | totals.step[of_step], return_inverse=True)
    own_ns = np.bincount(of_row.reshape(-1), weights=totals.sum_ns[of_step], minlength=len(keys))
    # a rank that did not time its steps says nothing: a wait for data alone is no step
    timed = np.unique(_keys(totals, Operation.STEP))
    is_timed = np.isin(keys, timed) & (own_ns > 0)
    steps, durations = (keys & 0xFFFFFFFF)[is_timed], own_ns[is_timed] / 1e9
    unique, num_ranks = np.unique(steps, return_counts=True)
    unique = unique[num_ranks >= min(2, num_ranks.max(initial=1))]
    seconds = _by_step(steps, durations, unique, "median")
    disturbed = np.unique(totals.step[np.isin(totals.operation, [one.number for one in _DISTURBING])])
    is_kept = ~np.isin(unique, disturbed)
    is_kept[:NUM_WARMUP_STEPS] = False
    kept = unique[is_kept]
    is_gc = totals.operation == Operation.GC.number
    in_kept = np.isin(totals.step, kept)
    first = np.full(len(kept), np.iinfo(np.int64).max)
    place = np.searchsorted(kept, totals.step[in_kept])
    np.minimum.at(first, place, totals.start_ns[in_kept])
    work, name = _work(values, kept)
    return StepSeries(
        step=kept.astype(np.int64),
        at_ns=first,
        seconds=seconds[is_kept],
        gc_seconds=_by_step(totals.step[is_gc].astype(np.int64), totals.sum_ns[is_gc] / 1e9, kept, "max"),
        work=work,
        work_name=name,
        peak_flops=_peak_flops(values),
        num_left_out=int((~is_kept).sum()),
    )


def _peak_flops(values: Values) -> float:
    """Return what most rows tell: one rank's nonsense must not become the job's."""
    told = values.value[(values.kind == StepValue.PEAK_FLOPS) & np.isfinite(values.value) & (values.value > 0)]
    return float(np.median(told)) if len(told) else 0.0


def _keys(totals: StepTotals, operation: Operation) -> Int64:
    rows = totals.operation == operation.number
    keys: Int64 = totals.rank[rows].astype(np.int64) << 32 | totals.step[rows]
    return keys


def _by_step(steps: Int64, values: Float64, wanted: Int64, aggregate: str) -> Float64:
    """Return the median, or the largest, of the values of each wanted step; 0 of a step without."""
    order = np.lexsort((values, steps))
    ordered_steps, ordered = steps[order], values[order]
    first = np.searchsorted(ordered_steps, wanted, side="left")
    last = np.searchsorted(ordered_steps, wanted, side="right")
    if not len(ordered):
        return np.zeros(len(wanted))
    count = last - first
    middle = first + (count - 1) // 2 if aggregate == "median" else last - 1
    found: Float64 = np.where(count > 0, ordered[np.clip(middle, 0, len(ordered) - 1)], 0.0)
    return found


def _work(values: Values, steps: Int64) -> tuple[Float64, str]:
    """Return what a rank did in each step: FLOPs where they are reported, else tokens of all ranks."""
    for kind, name in ((StepValue.MODEL_FLOPS, "FLOP"), (StepValue.TOKENS, "tokens")):
        rows = (values.kind == kind) & np.isfinite(values.value) & (values.value > 0)
        found = _by_step(values.step[rows].astype(np.int64), values.value[rows], steps, "median")
        if len(steps) and (found > 0).all():
            return found, name
    return np.zeros(len(steps)), ""
