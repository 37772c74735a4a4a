"""Completed steps as observers see them."""

from __future__ import annotations

import math

from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.data.step_batch import StepBatch
from megatrain.training.observers.step_observer import CompletedStep
from megatrain.training.step import Requests, StepOutcome


def completed_step(index: int) -> CompletedStep:
    """Return step number `index`, counted from 0, of a run whose steps compute nothing."""
    outcome = StepOutcome(loss=math.log(2.0), grad_norm=1.0, is_skipped=False, agreed=Requests())
    batch = StepBatch(cursor=4 * index, microbatches=[], global_batch_size=4)
    return CompletedStep(index, batch, outcome, TrainingProgress(step=index + 1), lr=1e-3, duration_s=0.1)
