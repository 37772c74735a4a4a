"""A host without processes: it obeys the driver's protocol as far as the driver can tell."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.host_records import (
    HostPhase,
    HostRecord,
    HostSaves,
    HostStatus,
    Milestones,
    RankFailure,
    Stall,
)
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import Halt, JobEnd, Round, RoundDeadlines
from megatrain_job.coordination.watch_event import Change, ChangeKind
from tests.helpers.simulated_etcd import KEYS, SimulatedEtcd


@dataclass
class SimulatedHost:
    """An executor and its workers, as far as the driver can tell. `place`: the position in the log up to which it has
    read."""

    name: str
    etcd: SimulatedEtcd
    num_workers: int
    switch: str
    num_starts: int = 0
    place: int = 0
    is_up: bool = False
    is_connected: bool = True
    """Whether it can reach etcd and the driver."""
    running: int = 0
    """The round whose workers run here, 0 for none."""
    took_part_in: int = 0
    step: int = 0
    phase: HostPhase = HostPhase.PARKED
    status_round: int = 0
    failures: tuple[RankFailure, ...] = ()
    stall: Stall | None = None
    saves: HostSaves | None = None
    step_s: float = 0.1
    rounds: dict[int, Round] = field(default_factory=dict)
    deadlines: dict[int, RoundDeadlines] = field(default_factory=dict)
    halts: dict[int, Halt] = field(default_factory=dict)
    end: JobEnd | None = None

    @property
    def session(self) -> str:
        return f"{self.name}-session-{self.num_starts}"

    @property
    def can_write(self) -> bool:
        return self.is_up and self.is_connected

    @property
    def is_registered(self) -> bool:
        """Whether etcd has this session of the host; the lease of the previous session may still be valid."""
        item = self.etcd.items.get(KEYS.host(self.name))
        return item is not None and decode(HostRecord, item.value, "host").session == self.session

    def start(self, now: float) -> None:
        """Begin a new session: nothing of the previous one is left."""
        self.num_starts += 1
        self.is_up, self.running, self.took_part_in = True, 0, 0
        self.phase, self.status_round, self.failures, self.stall = HostPhase.PARKED, 0, (), None
        self.register(now)

    def register(self, now: float) -> None:
        if self.can_write:
            record = HostRecord(
                host=self.name, session=self.session, pid=1, address=self.name, store_port=1, liveness_port=2,
                num_workers=self.num_workers, config_hash="", version="", hardware="", joined_unix_s=now, is_fit=True,
                labels={"switch": self.switch},
            )  # fmt: skip
            self.etcd.put(KEYS.host(self.name), encode(record))
            self.write_status(now)

    def kill(self) -> None:
        """End the executor; its workers die with it."""
        self.is_up, self.running = False, 0

    def lose_lease(self) -> None:
        """Delete the host's keys from etcd: it is dead, or cut off."""
        self.etcd.delete([KEYS.host(self.name), KEYS.status(self.name)])

    def fail(self, now: float, *, is_cascade: bool, exit_code: int = -9, label: str = "", action: str = "") -> None:
        """Let a worker die."""
        if self.running and self.is_up:
            part = self.rounds[self.running].part_of(self.name, self.session)
            assert part is not None
            failure = RankFailure(part.first_rank, exit_code, now, label, action, is_cascade)
            self.failures, self.phase, self.running = (failure,), HostPhase.FAILED, 0
            self.write_status(now)

    def read_log(self, count: int) -> None:
        """Read more of the log."""
        if not self.is_connected:
            return
        for changes in self.etcd.log[self.place : self.place + count]:
            for change in changes.changes:
                with suppress(CoordinationError):  # a record that cannot be read is skipped
                    self._note(change)
        self.place = min(self.place + count, len(self.etcd.log))

    def _note(self, change: Change) -> None:
        key = change.item.key.decode()
        match KEYS.parts(key), change.kind:
            case ("rounds", number), ChangeKind.PUT:
                self.rounds[int(number)] = decode(Round, change.item.value, key)
            case ("halts", number), ChangeKind.PUT:
                self.halts[int(number)] = decode(Halt, change.item.value, key)
            case ("deadlines", number), ChangeKind.PUT:
                self.deadlines[int(number)] = decode(RoundDeadlines, change.item.value, key)
            case ("end",), ChangeKind.PUT:
                self.end = decode(JobEnd, change.item.value, key)

    def act(self, now: float) -> None:
        """Carry out the orders that arrived: stop, start, or complete a step."""
        if not self.is_up:
            return
        newest = max(self.rounds, default=0)
        if self.end is not None:
            self.running = 0
        elif self.running:
            if self.running in self.halts or newest > self.running:
                self._stopped(self.running, now)
            else:
                self._train(now)
        elif newest:
            self._without_workers(newest, now)

    def fence(self, now: float) -> None:
        """Stop the workers of a host that is cut off and sees no step."""
        if self.is_up and not self.is_connected and self.running:
            self._stopped(self.running, now)

    def _stopped(self, number: int, now: float) -> None:
        self.running, self.phase, self.status_round = 0, HostPhase.STOPPED, number
        self.write_status(now)

    def _train(self, now: float) -> None:
        if self.phase is HostPhase.STARTING:
            self.phase = HostPhase.RUNNING
        elif self.stall is None:
            self.step += 1
        self.write_status(now)

    def _without_workers(self, newest: int, now: float) -> None:
        round_ = self.rounds[newest]
        is_mine = round_.part_of(self.name, self.session) is not None
        if is_mine and newest not in self.halts and self.status_round < newest:
            self.running = self.took_part_in = self.status_round = newest
            self.phase, self.failures, self.stall, self.step = HostPhase.STARTING, (), None, 0
            self.write_status(now)
        elif is_mine and newest in self.halts and (self.phase is not HostPhase.STOPPED or self.status_round < newest):
            self._stopped(newest, now)
        elif not is_mine and newest > self.took_part_in > 0 and self.can_write:
            self.start(now)

    def write_status(self, now: float) -> None:
        """Write the status."""
        if not self.can_write or KEYS.host(self.name) not in self.etcd.items:
            return
        is_running = self.phase is HostPhase.RUNNING
        milestones = Milestones(now, now, now, now) if is_running else Milestones()
        status = HostStatus(
            self.name, self.session, self.phase, self.status_round, alive_ranks="1" if self.running else "",
            min_step=self.step if is_running else None, resumed_step=0, median_step_s=self.step_s,
            milestones=milestones, failures=self.failures, stall=self.stall, saves=self.saves,
            interval_s=self.step_s if self.step else None, stop_s=1.5 * self.step_s if self.step else None,
        )  # fmt: skip
        self.etcd.put(KEYS.status(self.name), encode(status))
