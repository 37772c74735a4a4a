"""The sample lengths of a job that resumes: past samples keep theirs, and each later change begins with a step.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatrain.checkpoint.continued_stream import first_changeable
from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream
from megatrain.config.batch import BatchSchedule
from megatrain.config.stages import step_begin
from megatrain.contracts.sample_ranges import num_kept


def lengths_problem(
    before: SampleStream, now: SampleStream, cursor: int, consumed_tokens: int, batches: BatchSchedule
) -> str:
    """Return why a job cannot continue `before` at sample `cursor`: its samples had other lengths. Empty if it can.

    The samples at which later stages begin follow from the lengths of all earlier samples, so the configuration must
    contain all earlier changes. A change may have come up to one step later than it was planned.
    """
    begin = first_changeable(before, cursor)
    recorded, planned = (_changes(stream.stages, begin) for stream in (before, now))
    if recorded[0][1] != planned[0][1]:
        lengths = f"its first samples had {recorded[0][1]} tokens, and those of the configuration have {planned[0][1]}"
        return f"{lengths}; set data.seq_len={recorded[0][1]}"
    largest = max(batches.batch.global_batch_size, *(stage.global_batch_size for stage in batches.stages), 0)
    if len(planned) == len(recorded) + 1:
        recorded = [*recorded, (begin, planned[-1][1])]  # the last planned change comes now
    is_same = len(recorded) == len(planned) and all(
        length == wanted and first <= begun and num_kept(first, begun, before.skipped) < largest
        for (begun, length), (first, wanted) in zip(recorded[1:], planned[1:], strict=True)
    )
    if is_same:
        return ""
    skipping = f" and after sample {begin - 1}, the last one that it skips" if begin > cursor else ""
    came = ", ".join(f"{length} from sample {first} on" for first, length in recorded)
    wanted = ", ".join(f"{length} from sample {first} on" for first, length in planned)
    return (
        f"its samples have had these tokens: {came}; by the stages of the configuration: {wanted}; restore seq_len and "
        "after_tokens of the stages that have begun, and the batch sizes before them, and let others begin after the "
        f"{consumed_tokens} tokens that the run has read{skipping}"
    )


def with_aligned_lengths(stream: SampleStream, batches: BatchSchedule, cursor: int) -> SampleStream:
    """Return the stream in which each change of the length from the cursor on begins with a step.

    Samples that a rollback skips move all later steps, and with them such a change. Stages of the mixture stay.
    """
    found: list[MixtureStage] = []
    for stage in stream.stages:
        # a stage cannot begin before the previous one, which may begin later than it was planned
        first = max(stage.first_sample, found[-1].first_sample) if found else stage.first_sample
        if found and first >= cursor and stage.seq_len != found[-1].seq_len:
            first = step_begin(batches, cursor, first, stream.skipped)
        # a stage without samples is dropped
        if found and found[-1].first_sample == first:
            found.pop()
        found.append(replace(stage, first_sample=first))
    return replace(stream, stages=tuple(found))


def _changes(stages: Iterable[MixtureStage], end: int) -> list[tuple[int, int]]:
    """Return the first sample of each length before sample number `end`, and the length."""
    found: list[tuple[int, int]] = []
    for stage in stages:
        if (not found or stage.first_sample < end) and (not found or stage.seq_len != found[-1][1]):
            found.append((stage.first_sample, stage.seq_len))
    return found
