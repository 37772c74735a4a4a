"""The log lines of a run about its batches before the first step: idle slots, later stages, and sample lengths.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.contracts.sample_ranges import SampleRanges, num_kept, position_after
from megatrain.contracts.step_plan import idle_text
from megatrain.data.reader import BatchReader


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


def length_notes(
    config: Config, reader: BatchReader, progress: TrainingProgress, skipped: SampleRanges
) -> Iterator[str]:
    """Yield from which step on samples have another length, and how many of them are not whole windows.

    progress: of the run. skipped: samples that it leaves out.
    """
    batches, sample, tokens = config.batch_schedule, progress.consumed_samples, progress.consumed_tokens
    stages = reader.mixture.stages
    seq_len = reader.mixture.seq_len(sample)
    for stage in stages:
        if stage.first_sample <= progress.consumed_samples or stage.seq_len == seq_len:
            continue
        step = progress.step + batches.steps_before(stage.first_sample, progress.consumed_samples, skipped)
        if step >= config.train.steps:
            return
        tokens += num_kept(sample, stage.first_sample, skipped) * seq_len
        sample, seq_len = stage.first_sample, stage.seq_len
        counts, weights = reader.mixture.counts(sample).tolist(), reader.mixture.weights(sample)
        assembled = sum(
            source.order.num_assembled(count)
            for source, count, weight in zip(reader.sources, counts, weights, strict=True)
            if weight and source is not None
        )
        # a stage among the samples that the run leaves out may have been removed since
        planned = [one for one in config.placed_stages if one.changes_length and one.first_sample <= sample]
        begin = f" (after_tokens={planned[-1].stage.after_tokens:,}, rounded up to a whole step)" if planned else ""
        yield (
            f"from step {step + 1} on, samples have {seq_len:,} tokens: at sample {sample:,}, after {tokens:,} tokens"
            f"{begin}; {assembled:,} of them are assembled from windows of the previous length, until the part of the "
            "data (data.part_tokens) that has begun is used up"
        )
