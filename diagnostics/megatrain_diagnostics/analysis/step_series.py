"""Computes the series for the search for drift: duration and work of each step, from the sums of some ranks.

All ranks of a job have the same pace, so a few ranks are enough. The duration of a step includes its wait for data, but
not the time between steps. The first steps, which compile and allocate, and steps after a checkpoint or an evaluation
are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain_diagnostics.analysis.confirmed_steps import steps_of_several_ranks
from megatrain_diagnostics.events.rows import LOWER_32, earliest_at, is_any_of, pair_keys
from megatrain_diagnostics.events.tables import Float64, Int64, StepTotals, Values, select

_NUM_FIRST_STEPS = 3
"""One more than in live detection (live.py), because here steps are compared with each other, not ranks in a step."""
_DISTURBING = (Operation.CHECKPOINT, Operation.CHECKPOINT_LOAD, Operation.EVALUATION)
SERIES_OPERATIONS = tuple(
    operation.number for operation in (Operation.STEP, Operation.DATA_WAIT, Operation.GC, *_DISTURBING)
)
"""Numbers of the operations whose sums the series needs."""


@dataclass(frozen=True, slots=True, eq=False)
class StepSeries:
    """One entry per step, ascending, without the disturbed steps."""

    step: Int64
    at_ns: Int64
    seconds: Float64
    """Median over the ranks."""
    gc_seconds: Float64
    """The longest time that a rank spent in garbage collection."""
    work: Float64
    """Work in the step, in the unit `work_name`; 0: not known."""
    work_name: str
    """The unit of `work`: "FLOP" (of a rank), "tokens" (of all ranks), or "" if the work is not known."""
    peak_flops: float
    """Peak of a device in FLOP/s; 0: not known."""
    num_left_out: int

    def __len__(self) -> int:
        return len(self.step)


def step_series(totals: StepTotals, values: Values) -> StepSeries:
    """Return the series of one round's steps.

    If several ranks report some steps, steps that only one rank reports are dropped as an error of that rank.
    """
    totals = select(totals, totals.step >= 0)
    rank_steps = pair_keys(totals.rank, totals.step)
    of_step = is_any_of(totals.operation, (Operation.STEP, Operation.DATA_WAIT))
    keys, of_row = np.unique(rank_steps[of_step], return_inverse=True)
    own_ns = np.bincount(of_row.reshape(-1), weights=totals.sum_ns[of_step], minlength=len(keys))
    # a wait for data without a timed step is not used
    is_timed = np.isin(keys, rank_steps[totals.operation == Operation.STEP.number]) & (own_ns > 0)
    steps, durations = (keys & LOWER_32)[is_timed], own_ns[is_timed] / 1e9
    unique = steps_of_several_ranks(steps)
    seconds = middle_by_step(steps, durations, unique)
    disturbed = totals.step[is_any_of(totals.operation, _DISTURBING)]
    is_kept = ~np.isin(unique, disturbed)
    is_kept[:_NUM_FIRST_STEPS] = False
    kept = unique[is_kept]
    in_kept = np.isin(totals.step, kept)
    first = earliest_at(len(kept), np.searchsorted(kept, totals.step[in_kept]), totals.start_ns[in_kept])
    gc_seconds = np.zeros(len(kept))
    is_gc = (totals.operation == Operation.GC.number) & in_kept
    np.maximum.at(gc_seconds, np.searchsorted(kept, totals.step[is_gc]), totals.sum_ns[is_gc] / 1e9)
    work, name = _work(values, kept)
    return StepSeries(
        step=kept.astype(np.int64),
        at_ns=first,
        seconds=seconds[is_kept],
        gc_seconds=gc_seconds,
        work=work,
        work_name=name,
        peak_flops=_peak_flops(values),
        num_left_out=int((~is_kept).sum()),
    )


def _peak_flops(values: Values) -> float:
    """Return the median of the reported peaks, so that a wrong value of one rank has no effect."""
    peaks = values.value[(values.kind == StepValue.PEAK_FLOPS) & np.isfinite(values.value) & (values.value > 0)]
    return float(np.median(peaks)) if len(peaks) else 0.0


def middle_by_step(steps: Int64, values: Float64, wanted: Int64) -> Float64:
    """Return the lower median of the values of each wanted step; NaN for a step without values.

    Shapes: steps and values [rows]; wanted and the result [steps].
    """
    order = np.lexsort((values, steps))
    ordered_steps, ordered = steps[order], values[order]
    first = np.searchsorted(ordered_steps, wanted, side="left")
    count = np.searchsorted(ordered_steps, wanted, side="right") - first
    if not len(ordered):
        return np.full(len(wanted), np.nan)
    found: Float64 = ordered[np.clip(first + (count - 1) // 2, 0, len(ordered) - 1)].astype(np.float64)
    return np.where(count > 0, found, np.nan)


def _work(values: Values, steps: Int64) -> tuple[Float64, str]:
    """Return the work in each step and its unit: FLOPs of a rank if known for all steps, else tokens of all ranks."""
    for kind, name in ((StepValue.MODEL_FLOPS, "FLOP"), (StepValue.TOKENS, "tokens")):
        rows = (values.kind == kind) & np.isfinite(values.value) & (values.value > 0)
        found = middle_by_step(values.step[rows].astype(np.int64), values.value[rows], steps)
        if len(steps) and (found > 0).all():
            return found, name
    return np.zeros(len(steps)), ""
