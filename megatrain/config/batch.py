"""Section [batch]: how many sequences an optimizer step consumes, and how that number changes during a run.

The ramp-up is Megatron's rule: the global batch starts at `rampup_start` and grows by `rampup_increment` after each
equal part of `rampup_samples`, until it is `global_batch_size`. Later stages (stages.py) may have other sizes. The
size of a step depends only on the number of its first sample, so a resumed run needs no state for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from megatrain.config.options import REQUIRED, option
from megatrain.contracts.sample_ranges import SampleRanges, num_kept, position_after

LARGEST_BATCH = 100_000_000
"""More than 1000 times any batch known today."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How many sequences an optimizer step consumes."""

    micro_batch_size: int = option(
        1,
        "Sequences in one forward pass of one data-parallel rank.",
        unit="sequences",
        minimum=1,
        maximum=LARGEST_BATCH,
    )
    global_batch_size: int = option(
        REQUIRED,
        "Sequences in one optimizer step, over all ranks; a multiple of micro_batch_size.",
        unit="sequences",
        minimum=1,
        maximum=LARGEST_BATCH,
    )
    rampup_start: int = option(
        0, "Global batch size at the first step of a ramp-up. 0: no ramp-up.", unit="sequences", minimum=0
    )
    rampup_increment: int = option(
        0, "Increase of the global batch at each level of the ramp-up.", unit="sequences", minimum=0
    )
    rampup_samples: int = option(
        0,
        "Sequences consumed until the global batch has its full size; each level lasts an equal share of them.",
        unit="sequences",
        minimum=0,
    )

    @property
    def without_rampup(self) -> BatchConfig:
        """The same sizes, with the full batch from the first step on."""
        return replace(self, rampup_start=0, rampup_increment=0, rampup_samples=0)


def rampup_levels(batch: BatchConfig) -> Sequence[int]:
    """Return every global batch size until the first stage, in ascending order; one element if there is no ramp-up."""
    if batch.rampup_start == 0:
        return (batch.global_batch_size,)
    # A range, because there may be millions of levels. The checks ensure that the last one is global_batch_size.
    return range(batch.rampup_start, batch.global_batch_size + 1, batch.rampup_increment)


@dataclass(frozen=True, slots=True)
class BatchStage:
    """The global batch size of the steps that begin at sample `first_sample` or later, until the next stage."""

    first_sample: int
    global_batch_size: int


class StepRun(NamedTuple):
    """Consecutive steps with the same global batch size. num_steps: None if no other size follows.

    cursor: the position from which the first of these steps takes its samples. If the run leaves out the samples there,
    the step takes those after them.
    """

    cursor: int
    global_batch_size: int
    num_steps: int | None


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The global batch size of every step of a run: that of the ramp-up, then that of each stage.

    stages: ascending. A stage begins with the first step whose first sample belongs to it, so a step never has parts of
    two sizes. The argument `skipped` of the methods: the samples that the run leaves out.
    """

    batch: BatchConfig
    stages: tuple[BatchStage, ...] = ()

    def size_at(self, sample: int) -> int:
        """Return the global batch size of the step whose first sample has number `sample`.

        Source: Megatron-LM's batch-size ramp-up, in integers: start + increment * floor(consumed / samples per level).
        """
        stage = self._num_begun(sample)
        if stage:
            return self.stages[stage - 1].global_batch_size
        levels = rampup_levels(self.batch)
        return levels[self._level_at(sample)]

    def runs_from(self, cursor: int, skipped: SampleRanges) -> Iterator[StepRun]:
        """Yield the steps from `cursor` on, those of the same size together. The last run has no end."""
        while True:
            first = position_after(cursor, 0, skipped)
            size, end = self.size_at(first), self._end_of_size(first)
            if end is None:
                yield StepRun(cursor, size, None)
                return
            # the last step of a run begins before `end`, and may end after it
            num_steps = -(-num_kept(first, end, skipped) // size)
            yield StepRun(cursor, size, num_steps)
            cursor = position_after(cursor, num_steps * size, skipped)

    def steps_from(self, cursor: int, skipped: SampleRanges) -> Iterator[tuple[int, int]]:
        """Yield (cursor, global batch size) of each step from `cursor` on, endlessly."""
        for start, size, num_steps in self.runs_from(cursor, skipped):
            position = start
            numbers: Iterable[int] = count() if num_steps is None else range(num_steps)
            for _ in numbers:
                yield position, size
                position = position_after(position, size, skipped)

    def cursor_after(self, cursor: int, num_steps: int, skipped: SampleRanges) -> int:
        """Return the cursor after `num_steps` steps from `cursor` on."""
        if not num_steps:
            return cursor
        for start, size, num_alike in self.runs_from(cursor, skipped):
            if num_alike is None or num_steps <= num_alike:
                return position_after(start, num_steps * size, skipped)
            num_steps -= num_alike
        raise AssertionError("the last run has no end")

    def steps_before(self, sample: int, cursor: int = 0, skipped: SampleRanges = ()) -> int:
        """Return how many steps from `cursor` on begin before sample number `sample`."""
        total = 0
        for start, size, num_steps in self.runs_from(cursor, skipped):
            begin = position_after(start, 0, skipped)
            own = -(-num_kept(begin, max(begin, sample), skipped) // size)
            if num_steps is None or own <= num_steps:
                return total + own
            total += num_steps
        raise AssertionError("the last run has no end")

    @property
    def without_rampup(self) -> BatchSchedule:
        """The same stages, with the full batch from the first step on."""
        return replace(self, batch=self.batch.without_rampup)

    def num_steps_by_size(self, num_steps: int) -> dict[int, int]:
        """Return how many of the first steps of a run have each global batch size."""
        found: dict[int, int] = {}
        for _, size, num_alike in self.runs_from(0, skipped=()):
            own = num_steps if num_alike is None else min(num_steps, num_alike)
            found[size] = found.get(size, 0) + own
            num_steps -= own
            if not num_steps:
                break
        return found

    def _num_begun(self, sample: int) -> int:
        return bisect_right(self.stages, sample, key=lambda stage: stage.first_sample)

    def _level_at(self, sample: int) -> int:
        last = len(rampup_levels(self.batch)) - 1
        return last if sample >= self.batch.rampup_samples else sample * last // self.batch.rampup_samples

    def _end_of_size(self, sample: int) -> int | None:
        """Return the first sample after `sample` at which a step may have another size, None if there is none."""
        stage = self._num_begun(sample)
        next_stage = self.stages[stage].first_sample if stage < len(self.stages) else None
        num_levels = len(rampup_levels(self.batch))
        level = self._level_at(sample)
        if stage or level == num_levels - 1:
            return next_stage
        next_level = -(-(level + 1) * self.batch.rampup_samples // (num_levels - 1))
        return next_level if next_stage is None else min(next_level, next_stage)
