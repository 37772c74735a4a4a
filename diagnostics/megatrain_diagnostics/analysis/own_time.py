"""Divides a rank's step into its own work and its waiting, from the sums of operations.

Forward and backward passes contain tensor-parallel collectives, which wait for the other tp ranks, so their time is
subtracted from compute. Collectives and receives end only when other ranks have arrived, so they are waiting. Of
each kind of overlapped collectives only the longest is used. Exchanges of checkpoints are ignored.

Replicas may have unequal numbers of micro-batches (docs/adr/0075-step-plan.md). A rank with more of them computes
longer on any host, so compute is compared as if all ranks had the same number. How much faster a step would be without
a slow rank depends on the real compute times: a rank with fewer micro-batches may be slow and delay no other.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from megatrain.contracts.black_box.operations import MODEL_COMPUTES, REPLICA_COLLECTIVES, TP_COLLECTIVES, Operation
from megatrain_diagnostics.analysis.medians import medians
from megatrain_diagnostics.analysis.step_ring import StepRow
from megatrain_diagnostics.events.tables import Float64, Int64


class Aspect(IntEnum):
    """The parts of a step; index of the rows of `aspects`."""

    COMPUTE = 0
    DATA = 1
    GC = 2
    WAIT = 3


_WAITS = tuple(
    operation
    for operation in Operation
    if (operation.is_collective or operation in (Operation.FORWARD_RECV, Operation.BACKWARD_RECV))
    and operation not in (*REPLICA_COLLECTIVES, Operation.CHECKPOINT_EXCHANGE)
)
_NO_TRAINING = (Operation.CHECKPOINT, Operation.CHECKPOINT_LOAD, Operation.EVALUATION, Operation.INIT)
"""A step with one of these is not compared: its sums include all spans that ended since the previous step."""

_MIN_SCALE_S = 1e-9


def aspects(row: StepRow) -> Float64:
    """Return seconds by aspect; 0 for ranks that did not report.

    The time of a rank's passes is scaled to the median number of passes. Shapes: [aspects, ranks].
    """
    found = np.stack([
        _own_passes(row) * per_pass(row.num_forwards) + row.of(Operation.OPTIMIZER),
        row.of(Operation.DATA_WAIT),
        row.of(Operation.GC),
        row.of(*_WAITS) + row.longest.sum(axis=0),
    ])  # fmt: skip
    found[:, ~row.has_reported] = 0.0
    return found


def computed(row: StepRow) -> Float64:
    """Return the seconds of compute for each rank's own number of passes; 0 for ranks that did not report.

    Shapes: [ranks].
    """
    found: Float64 = np.where(row.has_reported, _own_passes(row) + row.of(Operation.OPTIMIZER), 0.0)
    return found


def per_pass(num_passes: Float64 | Int64) -> Float64:
    """Return the factors that scale each rank's number of passes to the median of the step; 1 if all numbers are equal.

    num_passes: 0 or NaN where it is not known; then the factor is 1. Shapes: num_passes and result [..., ranks].
    """
    factors = np.ones(num_passes.shape)
    for step in np.ndindex(num_passes.shape[:-1]):
        passes = num_passes[step]
        is_known = passes > 0
        if is_known.any():
            factors[step][is_known] = medians(passes[is_known], axis=0) / passes[is_known]
    return factors


def is_only_training(row: StepRow) -> bool:
    """Return whether no rank initialized, loaded, saved or evaluated since the previous step."""
    return not row.of(*_NO_TRAINING).any()


def typical_step_s(row: StepRow) -> float:
    """Return the median duration of the step over the ranks that reported; 0 if no rank did."""
    found = row.of(Operation.STEP)[row.has_reported]
    return float(medians(found, axis=0)) if len(found) else 0.0


def scale_of(stage_medians: Float64, stage_of: Int64, step_s: float) -> Float64:
    """Return the time in s that excesses are divided by: the median compute of a rank's stage, or else the step.

    It is never 0. Shapes: stage_medians [stages]; stage_of, result [ranks].
    """
    typical = np.where(stage_medians > 0.0, stage_medians, step_s)
    scale: Float64 = np.maximum(typical, _MIN_SCALE_S)[stage_of]
    return scale


def _own_passes(row: StepRow) -> Float64:
    """Return the seconds of the passes without the collectives inside them. Shapes: [ranks]."""
    passes = row.of(*MODEL_COMPUTES)
    found: Float64 = passes - np.minimum(row.of(*TP_COLLECTIVES), passes)
    return found
