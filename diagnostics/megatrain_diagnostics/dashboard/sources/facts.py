"""What a source knows beside etcd's snapshot: records on disk and in etcd, the series of steps, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatrain.checkpoint.survey import Survey
from megatrain.config.config import Config
from megatrain.contracts.config_changes import ConfigChange
from megatrain.contracts.host_records import CheckReport, HangEvidence
from megatrain.contracts.incident import Incident
from megatrain.jobs.notes import Note
from megatrain.jobs.run_standing import RunStanding
from megatrain.jobs.verdict_cases import Case
from megatrain_diagnostics.dashboard.sources.series_book import EMPTY, SeriesSnapshot
from megatrain_diagnostics.store.rounds import RoundSeen


@dataclass(frozen=True, slots=True)
class CheckpointsSeen:
    """The checkpoints of a run as they were at the last look; `survey` None: not looked yet, or `problem` says why."""

    place: str = ""
    survey: Survey | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """All of a job that does not come with a JobSnapshot. Incidents and cases are the oldest first."""

    incidents: tuple[Incident, ...] = ()
    """Of all launches: those in etcd, and older ones on disk."""
    damaged_incidents: Mapping[str, str] = field(default_factory=dict)
    """Unreadable ones, by id, with the reason."""
    cases: tuple[Case, ...] = ()
    """Verdicts and outcomes, of etcd and of the audit."""
    checks: Mapping[str, CheckReport] = field(default_factory=dict)
    """By host, the newest report of its health checks that etcd still has."""
    evidence: tuple[HangEvidence, ...] = ()
    """Of the newest stuck round, as etcd has it."""
    config: Config | None = None
    standing: RunStanding | None = None
    """Of a recorded job: how it is, by its directory."""
    reported_step: int | None = None
    """Of a recorded job, the last that rank 0 reported: it is known where events were never streamed, or expired."""
    is_daemon_alive: bool | None = None
    """None: unknown."""
    rounds: tuple[RoundSeen, ...] = ()
    series: SeriesSnapshot = EMPTY
    checkpoints: CheckpointsSeen = CheckpointsSeen()
    notes: tuple[Note, ...] = ()
    """Of people, retracted ones too."""
    changes: tuple[ConfigChange, ...] = ()
    """Of the configuration."""
    problems: tuple[str, ...] = ()
    """What could not be read, a sentence each."""
