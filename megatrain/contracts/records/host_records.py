"""An executor's records of its host: its identity, the state of its workers, and the results of its checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class HostRecord:
    """An executor that takes part in a job. Each start of an executor has a new `session`."""

    host: str
    session: str
    pid: int
    address: str
    """The address at which other hosts reach it."""
    store_port: int
    """Port of the key-value store where workers meet when this host is the first of a round."""
    liveness_port: int
    """A connection to this port receives the session; a refused connection means that this executor is gone."""
    num_workers: int
    config_hash: str
    version: str
    hardware: str
    joined_unix_s: float
    is_fit: bool
    """Whether the host passed its checks and receives orders. An unfit host stays registered, with the reason."""
    unfit_reason: str = ""
    is_driver_candidate: bool = True
    """False: it was launched with --no-driver and is never the driver."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Its location, for instance switch=s1: hosts of one switch get neighboring ranks."""


class HostPhase(StrEnum):
    """What an executor is doing."""

    PARKED = "parked"
    """No round includes it: it is a spare, or the job is between two rounds."""
    STARTING = "starting"
    """Workers of `round` are starting, connecting or loading."""
    RUNNING = "running"
    """All its ranks have completed a step of `round`."""
    STOPPING = "stopping"
    """Its workers of `round` are being killed: some of their processes still exist."""
    STOPPED = "stopped"
    """No worker of `round` or of an older round is left on this host."""
    FAILED = "failed"
    """A worker of `round` has failed; the others are being stopped or have been stopped."""
    DONE = "done"
    """All workers of `round` ended with exit code 0, or with 75 after a request to save and stop."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank ended, and the cause that its log shows (labels and actions of megatrain_job.failures)."""

    rank: int
    exit_code: int
    """Negative: the number of the signal that ended it."""
    at_unix_s: float
    label: str = ""
    action: str = ""
    is_cascade: bool = False
    culprit: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class Stall:
    """Ranks made no progress for longer than the limit of their phase.

    `phase`, `step`, `silent_s` and `limit_s` are those of the rank that has been silent for longest.
    """

    phase: str
    step: int
    silent_s: float
    limit_s: float
    at_unix_s: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Milestones:
    """When the last of a host's ranks reached each milestone of its round; None: not yet. Unix seconds."""

    started_unix_s: float | None = None
    """Workers were forked."""
    joined_unix_s: float | None = None
    """All process groups are built; the rendezvous is complete."""
    loaded_unix_s: float | None = None
    """The state is restored."""
    first_step_unix_s: float | None = None
    """A step is completed."""


@dataclass(frozen=True, slots=True)
class HostSaves:
    """Successes and failures of a host's checkpoint writer. Times are Unix seconds; None: nothing yet."""

    saved_step: int | None = None
    """Step of the newest checkpoint that the writer found committed."""
    saved_unix_s: float | None = None
    num_failed: int = 0
    """Consecutive snapshots that could not be stored; a commit resets the count to 0."""
    failing_unix_s: float | None = None
    """When the first of these failed."""
    error: str = ""
    """Why the last of these failed."""
    num_bytes: int = 0
    """Bytes that this host wrote for its last checkpoint."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The disk space of a directory of the job, as one host measures it."""

    path: str
    free_bytes: int
    total_bytes: int
    full_in_s: float | None = None
    """Seconds until the disk is full at the current rate; None: it does not fill up, or the rate is not known yet."""

    def __post_init__(self) -> None:
        if self.full_in_s is not None and not self.full_in_s >= 0:
            raise ValueError(f"full_in_s={self.full_in_s} of {self.path!r}; expected 0 or more")


@dataclass(frozen=True, slots=True)
class HostStatus:
    """The state of a host's workers. Written at once after an event, otherwise at most every few seconds."""

    host: str
    session: str
    phase: HostPhase
    round: int = 0
    """The newest round for which this host has started or stopped workers."""
    alive_ranks: str = ""
    """Bitmap of local ranks with a live process, in hexadecimal. Local rank 0 is the lowest bit."""
    min_step: int | None = None
    max_step: int | None = None
    """Steps completed by the slowest and the fastest rank in this round."""
    resumed_step: int | None = None
    """Completed steps when the round began to train."""
    last_step_unix_s: float | None = None
    """When the slowest rank completed its last step."""
    median_step_s: float | None = None
    step_phase: str = ""
    """Phase of the slowest rank, by the name in the black box."""
    exit_code: int | None = None
    """The largest exit code of the workers, when phase is DONE."""
    milestones: Milestones = field(default_factory=Milestones)
    failures: tuple[RankFailure, ...] = ()
    """Failures in this round, the earliest first."""
    stall: Stall | None = None
    completed_command: int = 0
    """Up to this number, the host has completed every command."""
    lost_hosts: tuple[str, ...] = ()
    """Addresses to which this host's workers lost the connection, according to their logs."""
    last_error: str = ""
    problem: str = ""
    """A problem for an operator, such as unwritable logs, or a temporary loss of the connection to etcd."""
    interval_s: float | None = None
    """The slowest rank's time from step to step, or half of the longest pause between two steps if that is more."""
    stop_s: float | None = None
    """The slowest rank's time from the request to stop until its state is in storage, as far as measured."""
    save_interval_s: float | None = None
    """Rank 0's current interval between checkpoints by time; None from other hosts."""
    is_streamed: bool = False
    """Whether this host runs a streamer, which implies that the job has a diagnosis."""
    saves: HostSaves | None = None
    """None until a checkpoint writer of this host has reported something."""
    disks: tuple[DiskSpace, ...] = ()


@dataclass(frozen=True, slots=True)
class RankPosition:
    """A rank's position in one group: the last collectives that it entered and left."""

    entered: int
    left: int


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """One rank of a stuck round, from its black box and from the system."""

    rank: int
    positions: Mapping[str, RankPosition]
    """By name of the group, unique in the job: see HangEvidence.groups."""
    process_state: str
    """The state letter of /proc/<pid>/stat: T is stopped, D waits in the kernel, Z is dead; empty: no process."""
    step: int
    phase: str
    newest_unix_s: float
    """When it last wrote to its black box."""
    in_flight: str = ""
    """The innermost operation that has not ended."""
    awaited_group: str = ""
    """Group of the operation that its host waits for, or last waited for; empty: no value."""
    awaited: int = 0
    """Sequence number of that operation in the group."""
    is_busy: bool = False
    """Whether the operation in flight is the host's own work, not an exchange with other ranks."""
    is_at_storage: bool = False
    """Whether the rank has just recorded that it waits for storage, not for other ranks."""
    is_on_device: bool = False
    """Whether positions, operation and wait are those of its accelerator; the host has run ahead of it."""


@dataclass(frozen=True, slots=True)
class GpuErrorRecord:
    """An error of a GPU in the kernel's log: one of NVIDIA's Xid messages."""

    gpu: str
    """Its PCI address."""
    number: int
    text: str
    """The message after the number, cut to a bounded length."""
    age_s: float
    """Seconds from the message to the evidence, by this host's clock."""


@dataclass(frozen=True, slots=True)
class HangEvidence:
    """One host's evidence on a stuck round. `silent`: ranks without a readable black box."""

    host: str
    session: str
    round: int
    at_unix_s: float
    groups: Mapping[str, tuple[int, ...]]
    """First rank, number of ranks and stride of each group, by a unique name: "dp:0+4x2"."""
    ranks: tuple[RankEvidence, ...]
    silent: tuple[int, ...] = ()
    is_after_halt: bool = False
    """Taken after the stop of the workers began: processes may be dead, and ranks may have left the operation they
    waited in because others were killed."""
    gpu_errors: tuple[GpuErrorRecord, ...] = ()
    """The recent errors of the host's GPUs, oldest first; empty if the kernel's log cannot be read."""


class CheckOutcome(StrEnum):
    PASSED = "passed"
    WARNING = "warning"
    FAILED = "failed"
    """The host may not take part."""
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One health check. `value` with `unit` is the measurement, if there is one."""

    name: str
    outcome: CheckOutcome
    detail: str
    duration_s: float
    value: float | None = None
    unit: str = ""
    partner: str = ""
    """The other host of a timed all-reduce between two hosts."""
    parts_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each part of that all-reduce: "compute" on this host, "wait" for the partner, and "reduce" with the
    partner. Without "reduce", the all-reduce failed."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The results of all checks of a host at one time."""

    host: str
    session: str
    at_unix_s: float
    results: tuple[CheckResult, ...]

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        return tuple(result for result in self.results if result.outcome is CheckOutcome.FAILED)

    @property
    def is_fit(self) -> bool:
        return not self.failed
