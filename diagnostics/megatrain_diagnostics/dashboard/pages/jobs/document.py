"""All jobs, those that need somebody first."""

from __future__ import annotations

from typing import Literal

from megatrain_diagnostics.dashboard.answers.document import Document

Trouble = Literal["red", "amber", "green", "ended"]


class RowReason(Document):
    """Why a job is not green, as its overview says it."""

    code: str
    level: Literal["green", "amber", "red"]
    text: str


class JobRow(Document):
    """A job in a line of the list."""

    name: str
    """What it is asked for by: jobs/NAME/ is its page, below jobs/NAME/api/v1/ is its API."""
    job: str
    """Its name in the configuration."""
    trouble: Trouble
    """Where it stands in the list: the level of one that runs, or that broke within a day; else ended."""
    level: Literal["green", "amber", "red"]
    """Its health, as `megatrain status` tells it."""
    state: str
    """As of /overview; else ended, killed, unreachable, never started or damaged."""
    headline: str
    reasons: tuple[RowReason, ...]
    """The first three."""
    num_reasons: int
    problems: tuple[str, ...]
    """What is wrong with its run directory."""
    is_live: bool
    """etcd has its state."""
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
    """Time in steps that count, by all time since the job began."""
    training_s: float | None
    """That time."""
    saved_step: int | None
    saved_unix_s: float | None
    num_hosts: int | None
    num_ranks: int | None
    num_incidents: int
    began_unix_s: float | None
    ended_unix_s: float | None
    run_directory: str
    why_not_opened: str
    """Empty where jobs/NAME/ shows it; else a sentence."""
    url: str
    """Address of the page that its launch serves; empty: no address is known."""


class TroubleCounts(Document):
    red: int
    amber: int
    green: int
    ended: int


class JobsDocument(Document):
    """The answer of /jobs."""

    at_unix_s: float
    runs_directory: str
    """Whose run directories are listed; empty: only what an etcd tells."""
    jobs: tuple[JobRow, ...]
    num_found: int
    """That the question leaves, of which `jobs` are some."""
    counts: TroubleCounts
    """Of all jobs."""
    problems: tuple[str, ...]
    """What hides jobs."""
    look_s: float
    """That the last look at all of them took."""
    role: Literal["viewer", "operator"]
    has_session: bool
    """Who asks signed in through the page, and can sign out."""
    version: str
