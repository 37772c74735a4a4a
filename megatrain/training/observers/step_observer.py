"""The interface of all observers of the step loop."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.data.step_batch import StepBatch
from megatrain.training.step import StepOutcome


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that every rank has completed."""

    index: int
    """Counted from 0."""
    batch: StepBatch
    outcome: StepOutcome
    progress: TrainingProgress
    """The progress of the run, including this step."""
    lr: float
    duration_s: float
    """From the request for the batch to the end of the update."""


class StepObserver:
    """The step loop calls this before and after every step, in its thread. An observer overrides what it needs."""

    def before_step(self, index: int) -> None:
        """Called for step number `index`, counted from 0, right before the loop requests its batch."""

    def after_step(self, done: CompletedStep) -> str:
        """Process a completed step, before evaluation and checkpoints. Return a line for the log, or an empty text."""
        return ""
