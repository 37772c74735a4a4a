"""Types of the list of all jobs. Jobs that need attention come first."""

from __future__ import annotations

from typing import Literal

from megatrain_dashboard.responses.document import Document

Severity = Literal["red", "amber", "green", "ended"]


class RowReason(Document):
    """Why a job is not green, as in its overview."""

    code: str
    level: Literal["green", "amber", "red"]
    text: str


class JobRow(Document):
    """A job as a row of the list."""

    name: str
    """The name in addresses: jobs/NAME/ is the job's page, and its API is below jobs/NAME/api/v1/."""
    job: str
    """The name in the configuration."""
    severity: Severity
    """Sorts the list: the health level of a job that runs or that broke within the last day; else ended."""
    level: Literal["green", "amber", "red"]
    """The health, as `megatrain status` reports it."""
    state: str
    """A state as in /overview; else ended, killed, unreachable, never started or damaged."""
    headline: str
    reasons: tuple[RowReason, ...]
    """The first three reasons."""
    num_reasons: int
    problems: tuple[str, ...]
    """The problems of the run directory."""
    is_live: bool
    """Whether etcd has the state of the job."""
    is_over: bool
    step: int | None
    train_steps: int | None
    remaining_s: float | None
    loss: float | None
    loss_line: tuple[float | None, ...]
    """Loss over the steps, as a few points."""
    step_s: float | None
    step_s_line: tuple[float | None, ...]
    tokens_per_s: float | None
    mfu: float | None
    effective_time_ratio: float | None
    """The time in steps that count, divided by all time since the job began."""
    training_s: float | None
    """The time in steps that count."""
    saved_step: int | None
    saved_unix_s: float | None
    num_hosts: int | None
    num_ranks: int | None
    num_incidents: int
    began_unix_s: float | None
    ended_unix_s: float | None
    run_directory: str
    why_not_opened: str
    """Empty where jobs/NAME/ shows the job; else a sentence."""
    url: str
    """The address of the page that the job's launch serves; empty: no address is known."""


class SeverityCounts(Document):
    red: int
    amber: int
    green: int
    ended: int


class JobsDocument(Document):
    """The response of /jobs."""

    at_unix_s: float
    runs_directory: str
    """The directory whose run directories are listed; empty: only jobs of an etcd are listed."""
    jobs: tuple[JobRow, ...]
    num_found: int
    """The number of jobs that match the request; `jobs` holds some of them."""
    counts: SeverityCounts
    """Counts over all jobs."""
    problems: tuple[str, ...]
    """Problems because of which jobs may be missing from the list."""
    poll_s: float
    """How long the last poll of all jobs took."""
    role: Literal["viewer", "operator"]
    has_session: bool
    """Whether the caller logged in through the page, and can log out."""
    version: str
