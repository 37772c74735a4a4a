"""An executor's records of its host: its identity, the state and position of its workers, and the results of its
checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class HostRecord:
    """An executor that takes part in a job. `session` is new with every life of an executor."""

    host: str
    session: str
    pid: int
    address: str
    """Where the other hosts reach it."""
    store_port: int
    """Of the key-value store that workers meet at when this host is the first of a round."""
    liveness_port: int
    """A connection gets the session as an answer; a refused connection means that this executor is gone."""
    num_workers: int
    config_hash: str
    version: str
    hardware: str
    joined_unix_s: float
    is_fit: bool
    """Whether its checks let it take part and its orders reach it; an unfit host stays registered, with the reason."""
    unfit_reason: str = ""
    is_driver_candidate: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    """Where it is, switch=s1 for instance: hosts of one switch get neighbouring ranks."""


class HostPhase(StrEnum):
    """What an executor is busy with."""

    PARKED = "parked"
    """No round names it: a spare, or between two rounds."""
    STARTING = "starting"
    """Workers of `round` are being started, meet, load."""
    RUNNING = "running"
    """All its ranks have completed a step of `round`."""
    STOPPING = "stopping"
    """Its workers of `round` were killed, and the kernel has not let go of all of them yet."""
    STOPPED = "stopped"
    """No worker of `round` or of an older one is left on this host."""
    FAILED = "failed"
    """A worker of `round` has ended in failure; the others are being stopped, or were."""
    DONE = "done"
    """All workers of `round` ended with exit code 0, or 75 where they were asked to save and stop."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank ended, and what its log says of it (labels and actions of megatrain.failures)."""

    rank: int
    exit_code: int
    """Negative: the signal that ended it."""
    at_unix_s: float
    label: str = ""
    action: str = ""
    is_cascade: bool = False
    culprit: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class Stall:
    """No progress for longer than this phase may take. `limit_s` was learned from the steps before."""

    phase: str
    step: int
    silent_s: float
    limit_s: float
    at_unix_s: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Milestones:
    """When the last of a host's ranks came so far in its round; None: not yet. Unix seconds."""

    started_unix_s: float | None = None
    """Workers were forked."""
    joined_unix_s: float | None = None
    """All groups are built: rendezvous is over."""
    loaded_unix_s: float | None = None
    """The state is restored."""
    first_step_unix_s: float | None = None
    """A step is completed."""


@dataclass(frozen=True, slots=True)
class HostSaves:
    """What the checkpoint writer of a host got to storage, and what it did not. Unix seconds; None: nothing yet."""

    saved_step: int | None = None
    """Of the newest checkpoint that it saw committed."""
    saved_unix_s: float | None = None
    num_failed: int = 0
    """Snapshots in a row that storage did not take; 0 since one was committed."""
    failing_unix_s: float | None = None
    """When the first of these failed."""
    error: str = ""
    """Why the last of these did."""
    num_bytes: int = 0
    """That this host wrote for its last checkpoint."""


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """How much room a directory of the job has, as one host sees it."""

    path: str
    free_bytes: int
    total_bytes: int
    full_in_s: float | None = None
    """At the pace at which it fills; None: it does not, or that is not known yet."""

    def __post_init__(self) -> None:
        if self.full_in_s is not None and not self.full_in_s >= 0:
            raise ValueError(f"full_in_s={self.full_in_s} of {self.path!r}; expected 0 or more")


@dataclass(frozen=True, slots=True)
class HostStatus:
    """How a host's workers are. Written at once when something happened, else at most every few seconds."""

    host: str
    session: str
    phase: HostPhase
    round: int = 0
    """The newest round that this host acted on, by starting or by stopping its workers."""
    alive_ranks: str = ""
    """Bitmap of local ranks with a live process, in hexadecimal, local rank 0 is the lowest bit."""
    min_step: int | None = None
    max_step: int | None = None
    """Steps completed by the slowest and the fastest rank in this round."""
    resumed_step: int | None = None
    """Steps that were done when the round began to train."""
    last_step_unix_s: float | None = None
    """When the slowest rank completed its last step."""
    median_step_s: float | None = None
    step_phase: str = ""
    """Phase of the slowest rank, in the words of the black box."""
    exit_code: int | None = None
    """Of the workers, when phase is DONE."""
    milestones: Milestones = field(default_factory=Milestones)
    failures: tuple[RankFailure, ...] = ()
    """In this round, the earliest first."""
    stall: Stall | None = None
    obeyed_command: int = 0
    lost_hosts: tuple[str, ...] = ()
    """Addresses that this host's workers lost the connection to, as their logs say."""
    last_error: str = ""
    trouble: str = ""
    """What an operator should know: logs that cannot be written, etcd out of reach for a while."""
    interval_s: float | None = None
    """What the slowest rank needs from step to step, with half of the longest pause between two where that is more."""
    stop_s: float | None = None
    """What the slowest rank needs from the request to stop until its state is in storage, as far as it was measured."""
    save_interval_s: float | None = None
    """From one checkpoint to the next where they are taken by time, as rank 0 holds it now; None from other hosts."""
    is_streamed: bool = False
    """This host runs a streamer: the job has a diagnosis."""
    saves: HostSaves | None = None
    """None: no checkpoint writer of this host has reported yet."""
    disks: tuple[DiskRoom, ...] = ()


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank stands in one group: the last collectives that it entered and left."""

    entered: int
    left: int


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """One rank of a stuck round, from its black box and from the system."""

    rank: int
    positions: Mapping[str, RankPosition]
    """By group; names are unique in the job: see HangEvidence.groups."""
    process_state: str
    """One letter of /proc/<pid>/stat: T is stopped, D waits in the kernel, Z is dead; empty: no process."""
    step: int
    phase: str
    newest_unix_s: float
    """When it wrote to its black box last."""
    in_flight: str = ""
    """The operation that it is in, innermost."""
    awaited_group: str = ""
    """Group of the operation that its host waits for, or waited for last; empty: not said."""
    awaited: int = 0
    """Which of that group's operations."""
    is_busy: bool = False
    """That operation is work of the host's own, no exchange with others."""
    is_at_storage: bool = False
    """It has just said that it waits for storage, not for other ranks."""


@dataclass(frozen=True, slots=True)
class HangEvidence:
    """What one host knows about a stuck round. `silent`: ranks without a readable black box."""

    host: str
    session: str
    round: int
    at_unix_s: float
    groups: Mapping[str, tuple[int, ...]]
    """First rank, number of ranks and stride of each group, by a name that tells groups apart: "dp:0+4x2"."""
    ranks: tuple[RankEvidence, ...]
    silent: tuple[int, ...] = ()
    is_after_halt: bool = False
    """Taken when the workers were being stopped already: processes may be dead, and ranks may have left what they
    waited in, because others were killed."""


class CheckOutcome(StrEnum):
    PASSED = "passed"
    WARNING = "warning"
    FAILED = "failed"
    """The host may not take part."""
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One health check. `value` with `unit` is what was measured, where something was."""

    name: str
    outcome: CheckOutcome
    detail: str
    duration_s: float
    value: float | None = None
    unit: str = ""
    partner: str = ""
    """Of a timed all-reduce between two hosts: the other one."""
    parts_s: Mapping[str, float] = field(default_factory=dict)
    """Its parts: "compute" alone, "wait" for the partner, "reduce" together; without the last it failed."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All checks of a host at one time."""

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
