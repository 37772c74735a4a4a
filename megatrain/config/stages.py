"""Where the stages of a run begin, in samples, and how long the samples of each are. Pure functions.

A stage begins after a number of tokens. With samples of one length, that is a division. A stage that changes the length
begins with a step, because all samples of a step have one length: at the first step on from its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.config.batch import BatchConfig, BatchSchedule, BatchStage
from megatrain.config.data import DataStageConfig
from megatrain.contracts.sample_ranges import SampleRanges, num_kept


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """A stage, its first sample in a run that leaves out none, and the tokens of its samples.

    first_token: how many tokens such a run has read then. changes_length: the stage before has another length.
    """

    stage: DataStageConfig
    first_sample: int
    first_token: int
    seq_len: int
    changes_length: bool


def placed_stages(stages: Sequence[DataStageConfig], batch: BatchConfig, seq_len: int) -> tuple[PlacedStage, ...]:
    """Return where stages, sorted by their tokens, begin. seq_len: the tokens of a sample before them.

    A stage whose tokens lie in front of the begin of the one before begins there, too.
    """
    found: list[PlacedStage] = []
    sample = token = 0  # the last change of the length
    batches = BatchSchedule(batch)
    for stage in stages:
        first = sample + max(0, -(-(stage.after_tokens - token) // seq_len))
        changes_length = stage.seq_len not in (0, seq_len)
        if changes_length:
            first = step_begin(batches, 0, first, ())
        first_token = token + (first - sample) * seq_len
        if changes_length:
            sample, token, seq_len = first, first_token, stage.seq_len
        if stage.global_batch_size:
            batches = BatchSchedule(batch, (*batches.stages, BatchStage(first, stage.global_batch_size)))
        found.append(PlacedStage(stage, first, first_token, seq_len, changes_length))
    return tuple(found)


def step_begin(batches: BatchSchedule, cursor: int, sample: int, skipped: SampleRanges) -> int:
    """Return `sample` if no step from `cursor` on has samples on both sides of it, else the sample behind that step.

    sample: not before the cursor. skipped: the samples that the run leaves out.
    """
    end = batches.cursor_after(cursor, batches.steps_before(sample, cursor, skipped), skipped)
    return end if end > sample and num_kept(sample, end, skipped) else sample
