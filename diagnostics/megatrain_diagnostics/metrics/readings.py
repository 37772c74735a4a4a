"""The current state of a host and of a job: plain values, from which metrics are made.

The number of values is bounded: no field grows with steps, rounds or processes. A host reports its own ranks, and the
daemon one score of each host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatrain.contracts.layout import Coordinate
from megatrain_diagnostics.devices.sample import HostSample
from megatrain_job.jobs.health import Health


@dataclass(frozen=True, slots=True)
class ProducerReading:
    """What a producer of pictures did for reads that ended in the last step."""

    num_pictures: float
    answer_s: float
    """The mean time of an answered request; 0 without one."""
    num_waiting: float
    """The most requests that waited in the producer when a request for one of these reads arrived."""
    num_failed: float


@dataclass(frozen=True, slots=True)
class RankReading:
    """One rank of this host, in the newest round. Times and durations in seconds. None: not known yet."""

    rank: int
    place: Coordinate
    gpu_uuid: str = ""
    step: int | None = None
    """Completed steps."""
    last_step_unix_s: float | None = None
    last_sign_unix_s: float | None = None
    """The time at which the rank last began or completed a step, or entered a phase."""
    step_s: float | None = None
    compute_s: float | None = None
    """In the last completed step: forward, backward, clip and optimizer."""
    collective_s: float | None = None
    """In collectives, sends and receives, including the time they wait."""
    data_wait_s: float | None = None
    gc_s: float | None = None
    label_tokens: float | None = None
    """Tokens that contribute to the loss in the last completed step. The next two fields are for the same samples."""
    documents: float | None = None
    squared_lengths: float | None = None
    """The sum of the squared lengths of the documents: the cost of attention."""
    replaced_samples: float | None = None
    """Since the rank's process began; None also if the run does not replace bad samples."""
    steps_ready: float | None = None
    """Steps that the data loader of the host had ready at the last request; None also without such a loader."""
    read_s: float | None = None
    """Reads of that loader that the rank recorded in the last step; only the first rank of a replica records them."""
    read_bytes: float | None = None
    loader_starts: float | None = None
    """How often the loader was started in this round; only the first rank of a replica records it."""
    picture_wait_s: float | None = None
    """The time in which the rank's reads waited for producers of pictures; None also if they asked none."""
    producers: tuple[ProducerReading, ...] = ()
    """By number, in the last step in which a read of the rank ended."""
    cache_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of data in object storage since this round opened it: "hit", "fetched", "evicted". Empty without such data,
    and on all but the first rank of a host with a data loader."""
    cache_not_stored: int = 0
    """Blocks and files that could not be written to the cache."""


@dataclass(frozen=True, slots=True)
class DevicesReading:
    """The GPUs and network interfaces of a host at the newest poll; `sample` None: not read yet."""

    sample: HostSample | None = None
    problem: str = ""
    """The reason why there are no samples, or the driver's error in the newest one; empty if there is neither."""
    xids: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """(UUID of a GPU, Xid number) -> count since the streamer started."""


@dataclass(frozen=True, slots=True)
class HostReading:
    """A host of a job, as reported by its streamer. Counts are since the streamer started."""

    job: str
    host: str
    version: str
    ranks: tuple[RankReading, ...] = ()
    median_step_s: float | None = None
    rows_sent: Mapping[str, int] = field(default_factory=dict)
    """By table."""
    rows_dropped: Mapping[str, int] = field(default_factory=dict)
    """By reason: spool-full, overwritten, ..."""
    spool_bytes: int = 0
    is_connected: bool = False
    clock_offset_s: float | None = None
    clock_error_s: float | None = None
    silent_ranks: int = 0
    """Number of this host's ranks without progress for longer than their phase may take."""
    devices: DevicesReading | None = None
    """None: not read."""


STEP_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True, slots=True)
class JobReading:
    """A job, as reported by its daemon. Counts are since the daemon started, unless noted otherwise."""

    job: str
    version: str
    health: Health | None = None
    """None: etcd has not answered yet."""
    step: int | None = None
    loss: float | None = None
    """May be NaN or infinite; exported unchanged."""
    grad_norm: float | None = None
    tokens: int = 0
    last_step_unix_s: float | None = None
    mfu: float | None = None
    step_buckets: tuple[int, ...] = (0,) * (len(STEP_BUCKETS_S) + 1)
    """Number of steps in each bucket, not cumulative: up to each of STEP_BUCKETS_S; the last entry: longer steps."""
    step_sum_s: float = 0.0
    rounds: int | None = None
    """Number of the newest round; None: not known yet."""
    incidents: Mapping[str, int] = field(default_factory=dict)
    """By kind, of all incidents that etcd still holds."""
    effective_time_ratio: float | None = None
    saved_step: int | None = None
    saved_unix_s: float | None = None
    save_failures: int = 0
    straggler_scores: Mapping[str, float] = field(default_factory=dict)
    """By host, of all compared hosts. /metrics has the highest MAX_SCORES of them."""
    least_straggler_score: float | None = None
    """Score from which a host is a straggler."""
    verdicts: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    """By kind, cause and confidence."""
    notices_sent: Mapping[str, int] = field(default_factory=dict)
    """Receiver -> messages that it has accepted. This and the next two count since the job began."""
    notices_failed: Mapping[str, int] = field(default_factory=dict)
    """Receiver -> failed attempts."""
    notices_given_up: Mapping[str, int] = field(default_factory=dict)
    """Receiver -> topics that were not sent because they ended too long ago."""
    rows_stored: Mapping[str, int] = field(default_factory=dict)
    rows_rejected: Mapping[str, int] = field(default_factory=dict)
    """By reason."""
    rows_dropped: int = 0
    """Rows that hosts report as dropped."""
    rows_not_analyzed: Mapping[str, int] = field(default_factory=dict)
    """Stored rows by the reason why they were not analyzed: their round has ended, or too many rows waited."""
    batches: Mapping[str, int] = field(default_factory=dict)
    """Received batches of rows: "new", or "repeated" after a connection was lost."""
    bytes_received: int = 0
    failed_commits: int = 0
    """Attempts to store rows that failed."""
    connected_hosts: int = 0
    silent_ranks: int = 0
    segment_bytes: int = 0


MAX_SCORES = 10
MAX_PRODUCERS = 16
"""Producers of pictures that a host exposes."""
