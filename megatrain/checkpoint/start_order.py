"""The sample order with which a job starts: that of its run so far, without the samples to skip. Pure functions.

The number of a skipped sample refers to the order in which the sample was read. So a branch records its order when it
begins (checkpoint_format/branches.py), and a job that starts before the branch has a checkpoint uses that record.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from megatrain.checkpoint.continuation import TrainingProgress, accepted_digests
from megatrain.checkpoint.continued_lengths import with_aligned_lengths
from megatrain.checkpoint.continued_stream import ContinuedStream, continued_stream, with_later_stages
from megatrain.checkpoint.start import StartingPoint
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.config.batch import BatchSchedule
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.records.rounds import Rollback
from megatrain.contracts.sample_ranges import SampleRanges, merged


def samples_to_skip(
    rollback: Rollback, progress: TrainingProgress, batches: BatchSchedule, skipped: SampleRanges
) -> SampleRanges:
    """Return the samples of the rollback's steps, for a job that resumes at `progress` and already skips `skipped`.

    Raises: CheckpointError when `progress` is already after the first of those steps.
    """
    if progress.step > rollback.skip_from:
        raise CheckpointError(f"step {progress.step} is after step {rollback.skip_from}, which must be skipped")
    steps = batches.steps_from(progress.consumed_samples, skipped)
    first, end = rollback.skip_from - progress.step, rollback.skip_to - progress.step
    cursors = [cursor for cursor, _ in islice(steps, first, end + 2)]
    return merged([(cursors[0], cursors[-1])])


def known_order(
    start: StartingPoint,
    recorded: SampleStream,
    now: SampleStream,
    config: Config,
    rollback: Rollback | None,
    progress: TrainingProgress,
) -> SampleStream:
    """Return the sample order that a checkpoint of this run recorded, with the stages and skips that came after it.

    now: the order that the configuration describes. If its mixture is new, it begins at the cursor of the newest
    checkpoint, or after the samples that the run skips there.
    """
    if start.stream is not None and progress.consumed_samples <= start.consumed_samples:
        later = skipping(start, start.stream, config, None, progress)
        if rollback is not None or progress.consumed_samples < start.consumed_samples:
            found = continued_stream(later, now, start.consumed_samples, accepted_digests(config))
            later = later if found.problem else found.stream
        recorded = with_later_stages(recorded, later, progress.consumed_samples)
    return skipping(start, recorded, config, rollback, progress)


def first_order(
    start: StartingPoint,
    begun: SampleStream,
    now: SampleStream,
    config: Config,
    rollback: Rollback | None,
    progress: TrainingProgress,
) -> ContinuedStream:
    """Return the order of a job that does not resume from a checkpoint of its own run; `problem` if there is none.

    start: the starting point of a run that begins at `progress`, or earlier in its order. begun: the order to use if
    the run has recorded none. now: the order that the configuration describes.
    """
    if start.stream is None:
        found = ContinuedStream(skipping(start, begun, config, rollback, progress))
    else:
        known = known_order(start, start.stream, now, config, rollback, progress)
        found = continued_stream(known, now, progress.consumed_samples, accepted_digests(config))
    stream = with_aligned_lengths(found.stream, config.batch_schedule, progress.consumed_samples)
    return replace(found, stream=stream)


def skipping(
    start: StartingPoint, stream: SampleStream, config: Config, rollback: Rollback | None, progress: TrainingProgress
) -> SampleStream:
    """Return the order without the samples that the lineage, the checkpoint or a rollback leaves out."""
    skipped = merged((*start.skipped, *stream.skipped))
    if rollback is not None:
        skipped = merged((*skipped, *samples_to_skip(rollback, progress, config.batch_schedule, skipped)))
    return replace(stream, skipped=skipped)
