"""The plans of the steps of a run: a pure function of the configuration, the cursor and the skipped samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from megatrain.config.batch import BatchConfig, batches_from, cursor_after
from megatrain.contracts.sample_ranges import SampleRanges
from megatrain.contracts.step_plan import Dealing, StepPlan


@dataclass(frozen=True, slots=True)
class StepSequence:
    """The plans of `num_steps` steps from sample `cursor` on, the same on all ranks.

    dealing: how the largest step, of batch.global_batch_size samples, is dealt to the replicas.
    """

    batch: BatchConfig
    dealing: Dealing
    cursor: int
    num_steps: int
    skipped: SampleRanges = ()

    def plans(self, first: int = 0) -> Iterator[StepPlan]:
        """Yield the plans of the steps from number `first` of the sequence on."""
        cursor = cursor_after(self.batch, self.cursor, first, self.skipped)
        size = self.batch.micro_batch_size
        for at, samples in islice(batches_from(self.batch, cursor, self.skipped), max(0, self.num_steps - first)):
            dealing = replace(self.dealing, num_microbatches=samples // size)
            yield StepPlan(at, samples, size, dealing, self.skipped)
