"""Going back to before training went wrong: from what, and without which samples. Pure.

A rollback is done once: the branch that it opens carries its id, and a job that finds that id in the lineage resumes
there.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from megatrain.checkpoint.continuation import Progress
from megatrain.checkpoint.start import StartingPoint
from megatrain.config.batch import BatchConfig, batches_from
from megatrain.config.checkpoint import CheckpointConfig
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.rounds import Rollback
from megatrain.contracts.sample_ranges import SampleRanges, merged


def pending(rollback: Rollback | None, start: StartingPoint) -> Rollback | None:
    """Return a rollback that the branch to go on with does not know of, None where there is nothing to do."""
    return None if rollback is None or rollback.rollback_id in start.rollbacks else rollback


def earlier(start: StartingPoint, rollback: Rollback, settings: CheckpointConfig) -> StartingPoint:
    """Return what a job may go back to; no candidates: to its initial weights.

    Only where no older checkpoint can ever have been, because the first was due later, are these what the job wants
    back; else what it needs is lost.
    Raises: CheckpointError when there are checkpoints, and all are newer.
    """
    found = tuple(one for one in start.candidates if not one.is_own or one.step <= rollback.to_step)
    if start.candidates and not found and (settings.interval <= rollback.to_step or settings.load):
        oldest = min(one.step for one in start.candidates)
        raise CheckpointError(
            f"training went wrong after step {rollback.to_step}, and the oldest checkpoint left is of step {oldest}; "
            "keep more of them (checkpoint.keep_last, keep_every), or begin another run with checkpoint.load"
        )
    return replace(start, candidates=found)


def left_out(rollback: Rollback, progress: Progress, batch: BatchConfig, skipped: SampleRanges) -> SampleRanges:
    """Return the samples of the rollback's steps, as a job has them that goes on from `progress` without `skipped`.

    Raises: CheckpointError when the job is beyond those steps already.
    """
    if progress.step > rollback.skip_from:
        raise CheckpointError(f"step {progress.step} is after step {rollback.skip_from}, which is to be left out")
    batches = batches_from(batch, progress.consumed_samples, skipped)
    first, end = rollback.skip_from - progress.step, rollback.skip_to - progress.step
    cursors = [cursor for cursor, _ in islice(batches, first, end + 2)]
    return merged([(cursors[0], cursors[-1])])
