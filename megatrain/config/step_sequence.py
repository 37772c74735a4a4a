"""The plans of the steps of a run: a pure function of the configuration, the cursor and the skipped samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from megatrain.config.batch import BatchSchedule
from megatrain.contracts.sample_ranges import SampleRanges
from megatrain.contracts.step_plan import Dealing, StepPlan


@dataclass(frozen=True, slots=True)
class StepSequence:
    """The plans of `num_steps` steps from sample `cursor` on, the same on all ranks.

    dealing: how a step of batch.global_batch_size samples is dealt to the replicas.
    """

    batches: BatchSchedule
    dealing: Dealing
    cursor: int
    num_steps: int
    skipped: SampleRanges = ()

    def plans(self, first: int = 0) -> Iterator[StepPlan]:
        """Yield the plans of the steps from number `first` of the sequence on."""
        cursor = self.batches.cursor_after(self.cursor, first, self.skipped)
        size = self.batches.batch.micro_batch_size
        for at, samples in islice(self.batches.steps_from(cursor, self.skipped), max(0, self.num_steps - first)):
            dealing = replace(self.dealing, num_microbatches=samples // size)
            yield StepPlan(at, samples, size, dealing, self.skipped)
