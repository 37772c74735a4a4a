"""Section [batch]: how many sequences an optimizer step consumes, and how that number grows at the start of a run.

The ramp-up is Megatron's rule: the global batch starts at `rampup_start` and grows by `rampup_increment` after each
equal part of `rampup_samples`, until it is `global_batch_size`. It depends only on the consumed samples, so a resumed
run needs no state for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatrain.config.options import option
from megatrain.contracts.sample_ranges import SampleRanges, position_after

LARGEST_BATCH = 100_000_000
"""More than 1000 times any batch known today."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How many sequences an optimizer step consumes."""

    micro_batch_size: int = field(
        default=1,
        metadata=option(
            "Sequences in one forward pass of one data-parallel rank.",
            unit="sequences",
            minimum=1,
            maximum=LARGEST_BATCH,
        ),
    )
    global_batch_size: int = field(
        metadata=option(
            "Sequences in one optimizer step, over all ranks; a multiple of micro_batch_size.",
            unit="sequences",
            minimum=1,
            maximum=LARGEST_BATCH,
        )
    )
    rampup_start: int = field(
        default=0,
        metadata=option(
            "Global batch size at the first step of a ramp-up. 0: no ramp-up.", unit="sequences", minimum=0
        ),
    )
    rampup_increment: int = field(
        default=0,
        metadata=option("Increase of the global batch at each level of the ramp-up.", unit="sequences", minimum=0),
    )
    rampup_samples: int = field(
        default=0,
        metadata=option(
            "Sequences consumed until the global batch has its full size; each level lasts an equal share of them.",
            unit="sequences",
            minimum=0,
        ),
    )


def rampup_levels(batch: BatchConfig) -> Sequence[int]:
    """Return every global batch size of the run in ascending order; one element if there is no ramp-up."""
    if batch.rampup_start == 0:
        return (batch.global_batch_size,)
    # A range, because there may be millions of levels. The checks ensure that the last one is global_batch_size.
    return range(batch.rampup_start, batch.global_batch_size + 1, batch.rampup_increment)


def global_batch_size_at(batch: BatchConfig, consumed_samples: int) -> int:
    """Return the global batch size of the step that starts after `consumed_samples`.

    Source: Megatron-LM's batch-size ramp-up, in integers: start + increment * floor(consumed / samples per level).
    """
    levels = rampup_levels(batch)
    if consumed_samples >= batch.rampup_samples:
        return levels[-1]
    return levels[consumed_samples * (len(levels) - 1) // batch.rampup_samples]


def batches_from(batch: BatchConfig, cursor: int, skipped: SampleRanges) -> Iterator[tuple[int, int]]:
    """Yield (cursor, global batch size) of each step from `cursor` on, endlessly, leaving out the `skipped` samples."""
    while True:
        size = global_batch_size_at(batch, cursor)
        yield cursor, size
        cursor = position_after(cursor, size, skipped)


def cursor_after(batch: BatchConfig, cursor: int, num_steps: int, skipped: SampleRanges) -> int:
    """Return the cursor after `num_steps` steps from `cursor` on that leave out the `skipped` samples."""
    if not num_steps:
        return cursor
    while num_steps and cursor < batch.rampup_samples:
        cursor = position_after(cursor, global_batch_size_at(batch, cursor), skipped)
        num_steps -= 1
    return position_after(cursor, num_steps * batch.global_batch_size, skipped)
