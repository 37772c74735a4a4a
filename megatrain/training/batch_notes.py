"""The log lines of a run about its batches, before the first step: idle slots, and later stages. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.contracts.sample_ranges import SampleRanges, position_after
from megatrain.contracts.step_plan import idle_text


def batch_notes(config: Config, layout: Layout, step: int, cursor: int, skipped: SampleRanges) -> Iterator[str]:
    """Yield a line about idle slots, if there are any now, and a line for each later stage with another batch size.

    step: the number of completed steps. cursor: where the next one begins. skipped: samples that the run leaves out.
    During a ramp-up, the full batch counts.
    """
    schedule = config.batch_schedule
    size = schedule.without_rampup.size_at(position_after(cursor, 0, skipped))
    idle = idle_text(config.dealing(layout, size))
    if idle:
        yield idle
    if not schedule.stages:
        return
    for start, next_size, num_steps in schedule.runs_from(cursor, skipped):
        if step >= config.train.steps:
            return
        is_in_stage = position_after(start, 0, skipped) >= schedule.stages[0].first_sample
        if is_in_stage and next_size != size:
            size = next_size
            idle = idle_text(config.dealing(layout, size))
            yield f"from step {step + 1} on, the global batch is {size}" + (f"; {idle}" if idle else "")
        if num_steps is not None:
            step += num_steps
