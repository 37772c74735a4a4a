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

    @property
    def max_slots(self) -> int:
        """The largest number of slots of a replica in any step of the run."""
        batch = self.batches.batch
        largest = max(batch.global_batch_size, *(stage.global_batch_size for stage in self.batches.stages), 0)
        return self._dealing_of(largest).max_slots

    def plans(self, first: int = 0) -> Iterator[StepPlan]:
        """Yield the plans of the steps from number `first` of the sequence on."""
        cursor = self.batches.cursor_after(self.cursor, first, self.skipped)
        size = self.batches.batch.micro_batch_size
        for at, samples in islice(self.batches.steps_from(cursor, self.skipped), max(0, self.num_steps - first)):
            yield StepPlan(at, samples, size, self._dealing_of(samples), self.skipped)

    def _dealing_of(self, global_batch_size: int) -> Dealing:
        return replace(self.dealing, num_microbatches=global_batch_size // self.batches.batch.micro_batch_size)
