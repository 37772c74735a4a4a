"""Rounds: who trains with which ranks, from when on, and that it is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_MAX_WORKERS = 1 << 16
_MAX_RANKS = 1 << 24
"""Far beyond what there is: whoever counts ranks one by one must not be made to count without end."""
MAX_SKIPPED_STEPS = 1000
"""That one rollback may leave out: far beyond what an alarm accuses, so that no wrong number costs an epoch."""
MAX_INTERVAL_S = 1e6
"""From one step to the next: days, so that no wrong number makes a driver wait for ever."""
TURN_MARK = ".turn-"
"""In what a "pairs" command asks its reports for: between what the pair tests are for and the number of the turn."""


@dataclass(frozen=True, slots=True)
class LostLaunch:
    """A launch that ended without saying so, as the launch after it found it."""

    launch_id: str
    first_host: str
    last_sign_unix_s: float
    """Its last sign of life that is known."""
    last_step: int | None = None
    """Steps that were done at that time."""
    cause: str = ""
    """machine-restarted, or launcher-lost; empty where it is unknown."""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Who a job is. Hosts whose configuration differs are refused."""

    job: str
    launch_id: str
    """Of the launch that began it; all hosts of one launch may share it, or leave it to the first."""
    config_hash: str
    config: Mapping[str, str]
    """section.key -> value as text, of every key: so that a host can say in which keys it differs."""
    min_hosts: int
    max_hosts: int
    num_workers: int
    """Workers on each host."""
    run_directory: str
    first_host: str
    created_unix_s: float
    lost_launch: LostLaunch | None = None
    """The launch before this one, where it died before it could record its end."""


@dataclass(frozen=True, slots=True)
class RoundHost:
    """A host's part in a round: ranks first_rank to first_rank + num_workers - 1."""

    host: str
    session: str
    address: str
    first_rank: int
    num_workers: int
    liveness_port: int = 0
    """As in its HostRecord, so that a driver that never saw that record can ask; 0: not known."""

    def __post_init__(self) -> None:
        if not (0 <= self.num_workers <= _MAX_WORKERS and 0 <= self.first_rank <= _MAX_RANKS):
            raise ValueError(
                f"first_rank={self.first_rank} and num_workers={self.num_workers} of {self.host!r}; expected "
                f"0 to {_MAX_RANKS} and 0 to {_MAX_WORKERS}"
            )


@dataclass(frozen=True, slots=True)
class Rollback:
    """Go back to a checkpoint of `to_step` or an older one, on a branch of its own, and leave out batches.

    The batches of steps skip_from to skip_to, both inclusive, as the job had them: a step is counted from 0, so that a
    checkpoint of step n comes before step n. Whoever finds `rollback_id` in the lineage has nothing to do.
    """

    rollback_id: str
    """The incident's."""
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
    """A set of hosts that trains. Never changed once it is written."""

    number: int
    world_size: int
    hosts: tuple[RoundHost, ...]
    """By first_rank."""
    store_address: str
    store_port: int
    """Where the workers meet, kept by the executor of the first host."""
    reason: str
    driver: str
    created_unix_s: float
    incident: str = ""
    fenced: tuple[str, ...] = ()
    """Sessions that never said that their workers of an older round are gone: no later round may name them."""
    rollback: Rollback | None = None
    """The launch's newest: workers that find it undone do it before they load."""

    def part_of(self, host: str, session: str) -> RoundHost | None:
        """Return a host's part, None when this round does not name this life of it."""
        for part in self.hosts:
            if part.host == host and part.session == session:
                return part
        return None

    def host_of(self, rank: int) -> RoundHost:
        """Return the part that has a rank. Raises: LookupError."""
        for part in self.hosts:
            if part.first_rank <= rank < part.first_rank + part.num_workers:
                return part
        raise LookupError(f"round {self.number} has no rank {rank}")


@dataclass(frozen=True, slots=True)
class Halt:
    """A round is over: its executors stop its workers and say so in their status."""

    number: int
    reason: str
    is_saving: bool
    """Workers are asked to save at the next agreed step; else they are killed."""
    created_unix_s: float
    incident: str = ""


@dataclass(frozen=True, slots=True)
class RoundDeadlines:
    """What the deadlines of a round's hosts follow from. Within a round both only ever grow."""

    number: int
    """The round's."""
    interval_s: float = 0.0
    """From step to step, as the hosts report it, with a margin."""
    stop_s: float = 0.0
    """From the request to stop until the state is in storage, as the hosts report it, with a margin; 0: not measured,
    or no longer than runtime.save_grace_s."""

    def __post_init__(self) -> None:
        for name in ("interval_s", "stop_s"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_INTERVAL_S:
                raise ValueError(f"{name}={value} of round {self.number}; expected 0 to {MAX_INTERVAL_S:g}")


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The job is over; every executor leaves with this exit code."""

    exit_code: int
    reason: str
    created_unix_s: float
    round: int = 0


@dataclass(frozen=True, slots=True)
class Cordon:
    """A host that no round may use until somebody takes the cordon away."""

    host: str
    reason: str
    by: str
    created_unix_s: float
    incident: str = ""


@dataclass(frozen=True, slots=True)
class HostCommand:
    """What executors shall do beside rounds. `hosts` empty: all of them."""

    number: int
    kind: str
    """"checkpoint": through the control pages. "evidence": write HangEvidence of the newest round. "check": run the
    health checks and report under `request`. "pairs": the timed all-reduce with the partner that `partners` names."""
    hosts: tuple[str, ...] = ()
    request: str = ""
    partners: Mapping[str, str] = field(default_factory=dict)
    """For "pairs": each host's partner, both ways."""
    created_unix_s: float = 0.0
