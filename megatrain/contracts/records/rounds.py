"""Records of rounds: which hosts train with which ranks, and the round's end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_MAX_WORKERS = 1 << 16
_MAX_RANKS = 1 << 24
"""Far beyond any real job, so that a wrong number cannot cause an endless loop over ranks."""
MAX_SKIPPED_STEPS = 1000
"""Maximum steps that one rollback may leave out: more than any alarm covers; a wrong number cannot skip an epoch."""
MAX_INTERVAL_S = 1e6
"""Longest time from one step to the next: 11 days, so that a wrong number cannot make a driver wait forever."""
TURN_MARK = ".turn-"
"""Separates the purpose of the pair tests from the number of the turn in the request id of a "pairs" command."""


@dataclass(frozen=True, slots=True)
class LostLaunch:
    """A launch that left no record of its end, as the next launch found it."""

    launch_id: str
    first_host: str
    last_sign_unix_s: float
    """When the launch last wrote something."""
    last_step: int | None = None
    """Steps that were completed at that time."""
    cause: str = ""
    """machine-restarted or launcher-lost; empty when unknown."""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The identity of a job. Hosts whose configuration differs are refused."""

    job: str
    launch_id: str
    """Id of the launch that began the job. All hosts of a launch pass the same id, or the first host generates it."""
    config_hash: str
    config: Mapping[str, str]
    """section.key -> value as text, of every key, so that a host can name the keys in which it differs."""
    min_hosts: int
    max_hosts: int
    num_workers: int
    """Workers on each host."""
    run_directory: str
    first_host: str
    created_unix_s: float
    lost_launch: LostLaunch | None = None
    """The previous launch, if it died before it could record its end."""


@dataclass(frozen=True, slots=True)
class RoundHost:
    """A host's part in a round."""

    host: str
    session: str
    address: str
    first_rank: int
    num_workers: int
    liveness_port: int = 0
    """As in the HostRecord, for a driver that never read that record; 0: unknown."""

    def __post_init__(self) -> None:
        if not (0 <= self.num_workers <= _MAX_WORKERS and 0 <= self.first_rank <= _MAX_RANKS):
            raise ValueError(
                f"first_rank={self.first_rank} and num_workers={self.num_workers} of {self.host!r}; expected "
                f"0 to {_MAX_RANKS} and 0 to {_MAX_WORKERS}"
            )

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_workers)


@dataclass(frozen=True, slots=True)
class Rollback:
    """An order to return to a checkpoint of `to_step` or an older one, on a new branch, and to leave out batches.

    The batches of steps skip_from to skip_to, both inclusive, are left out. Steps count from 0, so a checkpoint of step
    n comes before step n. A job that finds `rollback_id` in its lineage has already performed the rollback.
    """

    rollback_id: str
    """The id of the incident."""
    to_step: int
    skip_from: int
    skip_to: int

    def __post_init__(self) -> None:
        is_ordered = 0 <= self.to_step <= self.skip_from <= self.skip_to
        if not self.rollback_id or not is_ordered or self.skip_to - self.skip_from >= MAX_SKIPPED_STEPS:
            raise ValueError(
                f"rollback {self.rollback_id!r} to step {self.to_step} without steps {self.skip_from} to "
                f"{self.skip_to}; expected an id, 0 <= to_step <= skip_from <= skip_to, and at most "
                f"{MAX_SKIPPED_STEPS} steps"
            )


@dataclass(frozen=True, slots=True)
class Round:
    """A set of hosts that trains. Never changed after it is written."""

    number: int
    world_size: int
    hosts: tuple[RoundHost, ...]
    """By first_rank."""
    store_address: str
    store_port: int
    """The store where the workers meet. The first host's executor runs it."""
    reason: str
    driver: str
    created_unix_s: float
    incident: str = ""
    fenced: tuple[str, ...] = ()
    """Sessions that never confirmed that their workers of an older round exited. No later round may include them."""
    rollback: Rollback | None = None
    """The launch's newest rollback. Workers perform it before they load, unless it has already been performed."""

    def part_of(self, host: str, session: str) -> RoundHost | None:
        """Return a host's part, None when this round does not name the host with this session."""
        for part in self.hosts:
            if part.host == host and part.session == session:
                return part
        return None

    def host_of(self, rank: int) -> RoundHost:
        """Return the part with a given rank. Raises: LookupError."""
        for part in self.hosts:
            if rank in part.ranks:
                return part
        raise LookupError(f"round {self.number} has no rank {rank}")


@dataclass(frozen=True, slots=True)
class Halt:
    """The end of a round: its executors stop its workers and report that in their status."""

    number: int
    reason: str
    is_saving: bool
    """Whether workers save at the next agreed step and then stop; otherwise they are killed."""
    created_unix_s: float
    incident: str = ""


@dataclass(frozen=True, slots=True)
class RoundDeadlines:
    """The times that determine the deadlines of a round's hosts. Within a round, both times only grow."""

    number: int
    """The number of the round."""
    interval_s: float = 0.0
    """Time from step to step, as the hosts report it, with a margin."""
    stop_s: float = 0.0
    """Time from the request to stop until the state is in storage, as hosts report it, with a margin; 0: not measured,
    or no longer than runtime.save_grace_s."""

    def __post_init__(self) -> None:
        for name in ("interval_s", "stop_s"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_INTERVAL_S:
                raise ValueError(f"{name}={value} of round {self.number}; expected 0 to {MAX_INTERVAL_S:g}")


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of the job: every executor exits with this code."""

    exit_code: int
    reason: str
    created_unix_s: float
    round: int = 0


@dataclass(frozen=True, slots=True)
class Cordon:
    """A host that no round may use until a person removes the cordon."""

    host: str
    reason: str
    by: str
    created_unix_s: float
    incident: str = ""


@dataclass(frozen=True, slots=True)
class HostCommand:
    """An order to executors that is neither a round nor a halt. `hosts` empty: to all of them."""

    number: int
    kind: str
    """"checkpoint": through the control pages. "evidence": write HangEvidence of the newest round. "check": run the
    health checks and report under `request`. "pairs": the timed all-reduce with the partner that `partners` names."""
    hosts: tuple[str, ...] = ()
    request: str = ""
    partners: Mapping[str, str] = field(default_factory=dict)
    """For "pairs": each host's partner, in both directions."""
