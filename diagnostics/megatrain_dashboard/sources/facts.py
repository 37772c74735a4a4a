"""The data of a source except etcd's snapshot: records on disk and in etcd, the series of steps, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatrain.checkpoint.survey import CheckpointState, FoundCheckpoint, Survey
from megatrain.config.config import Config
from megatrain.contracts.records.host_records import CheckReport, HangEvidence
from megatrain.contracts.records.incident import Incident
from megatrain.run_files.config_changes import ConfigChange
from megatrain_dashboard.sources.series_builder import EMPTY, SeriesSnapshot
from megatrain_diagnostics.store.rounds_and_hosts import RoundSeen
from megatrain_job.jobs.assessment import Assessment
from megatrain_job.jobs.notes import Note
from megatrain_job.jobs.run_state import RunState
from megatrain_job.jobs.verdict_cases import VerdictWithOutcome


@dataclass(frozen=True, slots=True)
class CheckpointsSeen:
    """The checkpoints at `location`, a path or URL, at the last poll.

    `survey` is None before the first poll, and after a poll that failed: `problem` has the reason.
    """

    location: str = ""
    survey: Survey | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """All data of a job that is not in a JobSnapshot. Incidents and cases have the oldest first."""

    incidents: tuple[Incident, ...] = ()
    """Incidents of all launches: those in etcd, and older ones on disk."""
    damaged_incidents: Mapping[str, str] = field(default_factory=dict)
    """By id of an unreadable incident, the reason."""
    cases: tuple[VerdictWithOutcome, ...] = ()
    """Verdicts and outcomes, from etcd and from the audit."""
    checks: Mapping[str, CheckReport] = field(default_factory=dict)
    """By host, the newest report of its health checks that etcd still has."""
    evidence: tuple[HangEvidence, ...] = ()
    """The evidence of the newest stuck round, from etcd."""
    config: Config | None = None
    run_state: RunState | None = None
    """The state of a recorded job, as its directory shows it."""
    reported_step: int | None = None
    """The last step that rank 0 of a recorded job reported. It is known even if events expired or were never
    streamed."""
    is_daemon_alive: bool | None = None
    """None: unknown."""
    rounds: tuple[RoundSeen, ...] = ()
    series: SeriesSnapshot = EMPTY
    checkpoints: CheckpointsSeen = CheckpointsSeen()
    notes: tuple[Note, ...] = ()
    """Notes of people, including retracted ones."""
    changes: tuple[ConfigChange, ...] = ()
    """Changes of the configuration."""
    problems: tuple[str, ...] = ()
    """One sentence for each thing that could not be read."""


def completed_step(assessment: Assessment | None, facts: JobFacts) -> int | None:
    """Return how many steps all ranks have completed: as hosts report it, else as streamed, reported or saved."""
    if assessment is not None and assessment.progress.step is not None:
        return assessment.progress.step
    saved = newest_saved(facts.checkpoints)
    known = [] if saved is None else [saved.step]
    known += [] if facts.reported_step is None else [facts.reported_step]
    if len(facts.series):
        known.append(int(facts.series.column("last")[-1]) + 1)
    return max(known, default=None)


def newest_saved(seen: CheckpointsSeen) -> FoundCheckpoint | None:
    """Return the newest checkpoint that is committed or pinned, preferring those in the job's history."""
    if seen.survey is None:
        return None
    counted = (CheckpointState.COMMITTED, CheckpointState.PINNED)
    whole = [checkpoint for checkpoint in seen.survey.checkpoints if checkpoint.state in counted]
    in_ancestry = [checkpoint for checkpoint in whole if checkpoint.is_in_ancestry]
    return max(
        in_ancestry or whole, key=lambda checkpoint: (checkpoint.written_unix_s or 0.0, checkpoint.step), default=None
    )
