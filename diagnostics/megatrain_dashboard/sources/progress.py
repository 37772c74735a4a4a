"""The progress of a job."""

from __future__ import annotations

from megatrain.checkpoint.survey import CheckpointState, FoundCheckpoint
from megatrain_dashboard.sources.facts import CheckpointsSeen, JobFacts
from megatrain_job.jobs.assessment import Assessment


def completed_step(assessment: Assessment | None, facts: JobFacts) -> int | None:
    """Return how many steps all ranks have completed: as hosts report it, else the most streamed, reported or saved."""
    if assessment is not None and assessment.progress.step is not None:
        return assessment.progress.step
    saved = newest_saved(facts.checkpoints)
    known = [] if saved is None else [saved.step]
    known += [] if facts.reported_step is None else [facts.reported_step]
    if len(facts.series):
        known.append(int(facts.series.column("last")[-1]) + 1)
    return max(known, default=None)


def newest_saved(seen: CheckpointsSeen) -> FoundCheckpoint | None:
    """Return the newest checkpoint that counts: committed or pinned, and in the job's history if there is one."""
    if seen.survey is None:
        return None
    counted = (CheckpointState.COMMITTED, CheckpointState.PINNED)
    whole = [one for one in seen.survey.checkpoints if one.state in counted]
    in_ancestry = [one for one in whole if one.is_in_ancestry]
    return max(in_ancestry or whole, key=lambda one: (one.written_unix_s or 0.0, one.step), default=None)
