"""Plans of steps for tests of readers, in which the schedule needs no more slots than micro-batches."""

from __future__ import annotations

from megatrain.contracts.sample_ranges import SampleRanges
from megatrain.contracts.step_plan import Dealing, StepPlan


def step_plan(
    cursor: int, global_batch_size: int, num_replicas: int = 1, micro_batch_size: int = 1, skipped: SampleRanges = ()
) -> StepPlan:
    """Return the plan of a step of `global_batch_size` samples from `cursor` on."""
    dealing = Dealing(global_batch_size // micro_batch_size, num_replicas)
    return StepPlan(cursor, global_batch_size, micro_batch_size, dealing, skipped)
