"""How far a job has come."""

from __future__ import annotations

from megatrain.checkpoint.survey import CheckpointState, FoundCheckpoint
from megatrain.jobs.assessment import Assessment
from megatrain_diagnostics.dashboard.sources.facts import CheckpointsSeen, JobFacts


def completed_step(assessment: Assessment | None, facts: JobFacts) -> int | None:
    """Return how many steps all ranks have completed, by what hosts say, or was streamed, reported, saved."""
    if assessment is not None and assessment.progress.step is not None:
        return assessment.progress.step
    saved = newest_saved(facts.checkpoints)
    told = [] if saved is None else [saved.step]
    told += [] if facts.reported_step is None else [facts.reported_step]
    if len(facts.series):
        told.append(int(facts.series.column("last")[-1]) + 1)
    return max(told, default=None)


def newest_saved(seen: CheckpointsSeen) -> FoundCheckpoint | None:
    """Return the checkpoint that was written last of those that count: not one that was found damaged."""
    if seen.survey is None:
        return None
    counted = (CheckpointState.COMMITTED, CheckpointState.PINNED)
    whole = [one for one in seen.survey.checkpoints if one.state in counted]
    in_line = [one for one in whole if one.is_in_line]
    return max(in_line or whole, key=lambda one: (one.written_unix_s or 0.0, one.step), default=None)
