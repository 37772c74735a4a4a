"""Types of /overview and /series.

The overview shows whether the job is healthy; if not, what is wrong, where and since when; what was done about it; and
what comes next.
"""

from __future__ import annotations

from typing import Literal

from megatrain_dashboard.responses.document import Document

Level = Literal["green", "amber", "red"]


class ReasonDocument(Document):
    """The reason why a job is not green. `code` never changes its meaning; `runbook`: a page below docs/runbooks."""

    code: str
    level: Level
    text: str
    since_unix_s: float | None
    runbook: str
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]


class HostCounts(Document):
    """Counts of all hosts that are registered, in the newest round, or cordoned."""

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
    """The next event if no person acts."""

    what: str
    """"nothing", or what the driver or the job is about to do."""
    why: str
    verdict_id: str
    """The verdict that waits for a person; else empty."""


class DiagnosisState(Document):
    """The completeness of the shown state: the daemon, silent ranks, and rows that were lost or rejected."""

    is_daemon_alive: bool | None
    silent_ranks: tuple[int, ...]
    """Ranks that reported nothing in the newest steps; at most 64 of them."""
    num_silent_ranks: int
    rows_dropped: int
    rows_refused: int
    problems: tuple[str, ...]
    """Damaged or foreign segments, and records that cannot be read."""


class OverviewDocument(Document):
    """The response of /overview. `at_unix_s`: the server's clock when the response was made."""

    at_unix_s: float
    state: str
    """training, starting, recovering, stuck, waiting, stopping, finished, saved and stopped, failed, not running,
    or unknown where etcd is out of reach; of a recorded run also killed, unreachable or never started."""
    level: Level
    """The health of the job, as `megatrain status` and /metrics report it."""
    reasons: tuple[ReasonDocument, ...]
    """The reasons why it is not green, the red ones first."""
    headline: str
    since_unix_s: float | None
    round: int | None
    step: int | None
    """The newest step that all ranks have completed."""
    last_step_unix_s: float | None
    train_steps: int | None
    """The number of steps that the job is configured to train."""
    tokens: int | None
    """Tokens trained on so far; steps that were repeated count once."""
    loss: float | None
    grad_norm: float | None
    step_s: float | None
    """The median of the newest steps."""
    tokens_per_s: float | None
    mfu: float | None
    remaining_s: float | None
    """The remaining time at this pace."""
    effective_time_ratio: float | None
    """The time in steps that count, divided by all time since the job began (MegaScale sec. 6.3)."""
    effective_time_ratio_last_hour: float | None
    checkpoint: CheckpointAge | None
    hosts: HostCounts
    num_open_incidents: int
    num_incidents: int
    open_incident: str
    """The id of the newest open incident, or empty."""
    next_action: NextAction
    diagnosis: DiagnosisState


class GapDocument(Document):
    """A time without a step that counts: from the end of a round's last such step to the next round's first step."""

    begin_unix_s: float
    end_unix_s: float
    round: int
    """The round that ended."""


class RangeDocument(Document):
    """The range that `from` and `to` name, by steps and by time, both ends included; null: no bound."""

    first_step: int | None
    last_step: int | None
    begin_unix_s: float | None
    end_unix_s: float | None


class SeriesDocument(Document):
    """The response of /series: one entry for each step, or for each `stride` steps if there are many, by column.

    The entry of a stride has the values of its last step; `*_low` and `*_high` are its extremes, so no spike is lost.
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
    """The round of each entry; where it changes, the job restarted."""
    bad_steps: tuple[int, ...]
    """Steps whose loss or gradient norm was not finite."""
    gaps: tuple[GapDocument, ...]
    """The longest of the visible gaps, in order of time."""
    range: RangeDocument


class SourceDocument(Document):
    """The training loss of one source of the data, over the reports in the range."""

    name: str
    num_tokens: int
    """Tokens of the source that have a label, in the steps that were read."""
    token_share: float
    """The fraction of all tokens that are from this source."""
    loss: float | None
    """Nats per token: the mean over the last tenth of the steps."""
    change: float | None
    """`loss` minus the mean over the first tenth; null for fewer than ten steps."""
    num_bad_steps: int
    """Steps in which its loss was not finite."""
    last_bad_step: int | None
    line: tuple[float | None, ...]
    """The loss at a few points that are evenly spread over the steps."""


class SourceSeriesDocument(Document):
    """The loss of one source, for each entry of `step`: the mean over tokens, and the highest of one step."""

    name: str
    loss: tuple[float | None, ...]
    loss_high: tuple[float | None, ...]


class SourcesDocument(Document):
    """The response of /sources: the losses by source; empty for a run with one source of data."""

    sources: tuple[SourceDocument, ...]
    """In the order in which the run reported them first; at most 1,024."""
    stride: int
    """Each entry of the series stands for this many steps."""
    step: tuple[int, ...]
    at_unix_s: tuple[float | None, ...]
    series: SourceSeriesDocument | None
    """The requested source. If none of that name is known, the source whose loss rose most or fell least."""
    is_sampled: bool
    """Whether only evenly spread parts of the steps were read because there are too many."""
    range: RangeDocument
