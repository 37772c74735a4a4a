"""Is the job healthy; if not what, where and since when; what did the system do about it; what comes next."""

from __future__ import annotations

from typing import Literal

from megatrain_diagnostics.dashboard.answers.document import Document

Level = Literal["green", "amber", "red"]


class ReasonDocument(Document):
    """Why a job is not green. `code` never changes its meaning; `runbook`: a page below docs/runbooks."""

    code: str
    level: Level
    text: str
    since_unix_s: float | None
    runbook: str
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]


class HostCounts(Document):
    """Of all hosts that are registered, in the newest round, or cordoned."""

    total: int
    training: int
    spare: int
    cordoned: int
    unfit: int
    lost: int


class CheckpointAge(Document):
    step: int
    branch: str
    written_unix_s: float | None


class NextAction(Document):
    """What happens next if nobody does anything."""

    what: str
    """"nothing", or what the driver or the job is about to do."""
    why: str
    verdict_id: str
    """Of a verdict that waits for a person; else empty."""


class DiagnosisState(Document):
    """Whether what is shown can be believed: is everything heard of that happens?"""

    is_daemon_alive: bool | None
    silent_ranks: tuple[int, ...]
    """In the newest steps nothing came from these: at most 64 of them."""
    num_silent_ranks: int
    rows_dropped: int
    rows_refused: int
    problems: tuple[str, ...]
    """Segments that are damaged or foreign, records that cannot be read."""


class OverviewDocument(Document):
    """The answer of /overview. `at_unix_s`: the server's clock when this was put together."""

    at_unix_s: float
    state: str
    """training, starting, recovering, stuck, waiting, stopping, finished, saved and stopped, failed, not running,
    or unknown where etcd is out of reach."""
    level: Level
    """The health of the job, as `megatrain status` and /metrics tell it."""
    reasons: tuple[ReasonDocument, ...]
    """Why it is not green: the red ones first."""
    headline: str
    since_unix_s: float | None
    round: int | None
    step: int | None
    """Completed by all ranks."""
    last_step_unix_s: float | None
    train_steps: int | None
    """That the job shall train."""
    tokens: int | None
    """Trained on so far, steps that were done again counted once."""
    loss: float | None
    grad_norm: float | None
    step_s: float | None
    """Median of the newest steps."""
    tokens_per_s: float | None
    mfu: float | None
    remaining_s: float | None
    """At this pace."""
    effective_time_ratio: float | None
    """Time in steps that count by all time since the job began (MegaScale sec. 6.3)."""
    effective_time_ratio_last_hour: float | None
    checkpoint: CheckpointAge | None
    hosts: HostCounts
    num_open_incidents: int
    num_incidents: int
    open_incident: str
    """Id of the newest that is open, or empty."""
    next_action: NextAction
    diagnosis: DiagnosisState


class GapDocument(Document):
    """A time without a step that counts: from the end of a round's last one to the begin of the next round's first."""

    begin_unix_s: float
    end_unix_s: float
    round: int
    """That ended."""


class RangeDocument(Document):
    """What `from` and `to` were understood as, by steps and by time, both ends included; null: no bound."""

    first_step: int | None
    last_step: int | None
    begin_unix_s: float | None
    end_unix_s: float | None


class SeriesDocument(Document):
    """The answer of /series: one entry a step or, of many steps, one for each `stride` of them, by column.

    Of a stride the last step stands; `*_low` and `*_high` are the extremes in it, so that no spike is lost.
    """

    stride: int
    step: tuple[int, ...]
    at_unix_s: tuple[float | None, ...]
    loss: tuple[float | None, ...]
    loss_low: tuple[float | None, ...]
    loss_high: tuple[float | None, ...]
    grad_norm: tuple[float | None, ...]
    grad_norm_high: tuple[float | None, ...]
    step_s: tuple[float | None, ...]
    step_s_low: tuple[float | None, ...]
    step_s_high: tuple[float | None, ...]
    tokens_per_s: tuple[float | None, ...]
    mfu: tuple[float | None, ...]
    round: tuple[int, ...]
    """Of each entry: where it changes, the job began anew."""
    bad_steps: tuple[int, ...]
    """Whose loss or gradient norm was no finite number."""
    gaps: tuple[GapDocument, ...]
    """Of those that can be seen the longest, in order."""
    range: RangeDocument
