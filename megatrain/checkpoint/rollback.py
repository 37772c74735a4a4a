"""Rollback to a step before training went wrong: which checkpoints qualify, and which samples to skip. Pure functions.

A rollback happens once: the branch that it opens records its id, and a job that finds that id in the lineage resumes
there.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.checkpoint.start import StartingPoint
from megatrain.config.batch import BatchConfig, batches_from
from megatrain.config.checkpoint import CheckpointConfig
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.records.rounds import Rollback
from megatrain.contracts.sample_ranges import SampleRanges, merged


def pending_rollback(rollback: Rollback | None, start: StartingPoint) -> Rollback | None:
    """Return the rollback if the branch to resume has not recorded it yet; None if there is nothing to do."""
    return None if rollback is None or rollback.rollback_id in start.rollbacks else rollback


def rollback_start(start: StartingPoint, rollback: Rollback, settings: CheckpointConfig) -> StartingPoint:
    """Return `start` with only the checkpoints before the rollback. Without any, the job draws initial weights again.

    Initial weights are right only when no older checkpoint ever existed because the first one was due later. Otherwise
    the checkpoint that the job needs was removed or lost.
    Raises: CheckpointError when there are checkpoints, all are newer, and an older one should exist.
    """
    found = tuple(one for one in start.candidates if not one.is_own or one.step <= rollback.to_step)
    if start.candidates and not found and (settings.interval <= rollback.to_step or settings.load):
        oldest = min(one.step for one in start.candidates)
        raise CheckpointError(
            f"training went wrong after step {rollback.to_step}, and the oldest checkpoint left is of step {oldest}; "
            "keep more of them (checkpoint.keep_last, keep_every), or begin another run with checkpoint.load"
        )
    return replace(start, candidates=found)


def samples_to_skip(
    rollback: Rollback, progress: TrainingProgress, batch: BatchConfig, skipped: SampleRanges
) -> SampleRanges:
    """Return the samples of the rollback's steps, for a job that resumes at `progress` and already skips `skipped`.

    Raises: CheckpointError when `progress` is already after the first of those steps.
    """
    if progress.step > rollback.skip_from:
        raise CheckpointError(f"step {progress.step} is after step {rollback.skip_from}, which must be skipped")
    batches = batches_from(batch, progress.consumed_samples, skipped)
    first, end = rollback.skip_from - progress.step, rollback.skip_to - progress.step
    cursors = [cursor for cursor, _ in islice(batches, first, end + 2)]
    return merged([(cursors[0], cursors[-1])])
