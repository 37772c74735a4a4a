"""Types of the list of all jobs. Jobs that need attention come first."""

from __future__ import annotations

from typing import Literal

from megatrain_dashboard.responses.document import Document

Severity = Literal["red", "amber", "green", "ended"]


class RowReason(Document):
    """The reason why a job is not green, as in its overview."""

    code: str
    level: Literal["green", "amber", "red"]
    text: str


class JobRow(Document):
    """A job as a row of the list."""

    name: str
    """The job's name in addresses: its page is jobs/NAME/, and its API is below jobs/NAME/api/v1/."""
    job: str
    """The job's name in its configuration."""
    severity: Severity
    """The health level if the job runs or broke within the last day; else `ended`. The most severe jobs come first."""
    level: Literal["green", "amber", "red"]
    """The health level that `megatrain status` reports."""
    state: str
    """A state as in /overview, or damaged."""
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
    """A few points of the loss over the steps."""
    step_s: float | None
    step_s_line: tuple[float | None, ...]
    tokens_per_s: float | None
    mfu: float | None
    effective_time_ratio: float | None
    """The training time (steps that count) divided by all time since the job began."""
    training_s: float | None
    """The training time: the time in steps that count."""
    saved_step: int | None
    saved_unix_s: float | None
    num_hosts: int | None
    num_ranks: int | None
    num_incidents: int
    began_unix_s: float | None
    ended_unix_s: float | None
    run_directory: str
    why_not_opened: str
    """The reason why jobs/NAME/ does not show the job, as a sentence; empty where it does."""
    url: str
    """The address of the page that the launch of the job serves; empty: not known."""


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
    """Problems that may keep jobs out of the list."""
    poll_s: float
    """The duration of the last poll of all jobs."""
    role: Literal["viewer", "operator"]
    has_session: bool
    """Whether the caller logged in through the page, and so can log out."""
    version: str
